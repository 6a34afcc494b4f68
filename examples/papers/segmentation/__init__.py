"""Semantic segmentation of street scenes, the second workload of the paper (daso-journal)."""

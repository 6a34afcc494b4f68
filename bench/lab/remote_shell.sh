#!/bin/sh
# Replaces ssh between the nodes of the lab: [-options] ADDRESS COMMAND...
# Line n of $LAB_NODES is the command that enters the node whose address ends in n.
set -eu
while [ "${1#-}" != "$1" ]; do shift; done
enter=$(echo "$LAB_NODES" | sed -n "${1##*.}p")
shift
exec $enter sh -c "$*"

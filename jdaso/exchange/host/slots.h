// Slots: exchanges of arrays between compiled programs and the progress thread, as data. See slots.cc.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jdaso {

namespace ffi = xla::ffi;

constexpr int kHeader = 8;          // HEADER_SIZE of core/exchange.py
constexpr int32_t kUncounted = -1;  // UNCOUNTED
enum State : int32_t { kFree, kFilling, kFilled, kDone, kFailed };

// What a device sends and reads of a leaf, `_PLACE` of layout.py. Offsets are from the start of the
// slot's memory. The sums of a leaf with int8 or float4 may end with padding. A leaf with rows has
// sums of float32. Those of a narrower wire are widened for a program whose leaf has float64.
struct Place {
  int64_t sent, wire_bytes;               // offset and bytes of what is sent
  int64_t sums, least_bytes, most_bytes;  // offset of the sums, and the bytes that may be read
  int64_t bits;                           // that float32 is rounded to: 16, 8 or 4; 0 if it is not
  int64_t item;                           // bytes of a number of the sums
  int64_t copy, copies;                   // copy `number mod copies` sends
};

struct Layout {
  int32_t senders, leaves;
  int64_t bytes;             // of a slot's memory
  int64_t family;            // equal for the wires of one list of leaves, whose slots are reused
  std::vector<Place> places; // [devices, leaves]
  const Place* of(int32_t device) const { return places.data() + int64_t{device} * leaves; }
};

// `Record` of slots.py: what a process has measured. Pairs are start and end.
struct Record {
  int32_t number, step;
  int64_t bytes_sent;
  double copy_to_host[2], transfer[2], wait[2], copy_to_device[2];
};

// Page-aligned memory of a slot. Python refers to it as well, because messages may still arrive in
// the memory of an exchange that has failed.
struct Block {
  Block(size_t bytes, bool pin);
  ~Block();
  Block(const Block&) = delete;
  char* memory;
  size_t bytes;
  bool pinned;
};

struct Slot {  // `Slot` of slots.py has the fields up to `memory`
  int32_t number, step, layout, state;
  int32_t parts_left;  // devices that have not posted yet
  int32_t awaited;     // whether a program has waited for it
  int32_t unpinned;    // whether its memory should be pinned and is not
  float header[kHeader];  // what this node has sent
  float total[kHeader];   // the header of the result
  char* memory;
  // From here on only slots.cc uses it.
  std::shared_ptr<Block> block;
  int64_t family;
  int32_t to_join;    // devices that have not begun to post
  int32_t collected;  // devices that have collected
  int32_t users;      // threads that read it, without those of which the state says so
  bool forgotten;     // it is freed when nobody uses it any more
  double read_since;  // when the first device began to read the sums
  std::string error;
  std::shared_ptr<Record> record;
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The slots of one exchange.
class Table {
 public:
  // `patience` are the seconds for which it waits for another device of this node, or for copies.
  Table(std::string posted_twice, std::string not_in_flight, double patience, bool talks)
      : posted_twice_(std::move(posted_twice)),
        not_in_flight_(std::move(not_in_flight)),
        patience_(patience),
        talks_(talks) {}

  int32_t Register(Layout layout);
  void Reserve(int32_t layout);
  const Layout& LayoutAt(int32_t index);

  // ---- What programs call. They raise Failure.
  Slot* BeginPost(int32_t number, int32_t step, const float* header, int32_t layout, bool pin);
  void EndPost(Slot* slot);
  void Discard(Slot* slot);
  Slot* BeginCollect(int32_t number, int32_t readers);
  void Count(Slot* slot, int32_t readers);
  void EndCollect(Slot* slot);

  // ---- What the progress thread calls.
  Slot* Next();
  void Done(Slot* slot, const float* total, int64_t bytes_sent, double began, double ended);
  void Fail(Slot* slot, const char* error);
  bool Wait(double seconds);
  std::string Problem();

  // ---- What any thread calls.
  void Wake();
  void Report(const std::string& problem);
  int32_t Hurry(int32_t change);
  int32_t AwaitPosted();
  void AwaitDone();
  std::vector<Slot*> InFlight();
  void Release(Slot* slot);
  void Restart();
  void Clear();
  void Close();
  std::vector<Record> Records(double* totals);

 private:
  Slot* Find(int32_t number);
  Slot* Take(const Layout& layout, bool reuse, std::shared_ptr<Block> fresh);
  void Retire(Slot* slot);
  void WakeLocked();
  void Free(Slot* slot);

  std::mutex mutex_;
  std::condition_variable changed_;  // the state of a slot
  std::condition_variable news_;     // for the progress thread
  std::deque<Layout> layouts_;       // whose elements never move
  std::deque<Slot> slots_;
  std::vector<std::shared_ptr<Block>> kept_;  // of failed exchanges
  std::deque<Slot*> filled_;  // in the order in which they were posted
  std::deque<std::string> problems_;
  std::deque<std::shared_ptr<Record>> records_;
  double totals_[4] = {};
  const std::string posted_twice_, not_in_flight_;
  const std::chrono::duration<double> patience_;
  int64_t problems_taken_ = 0, problems_told_ = 0;  // by the progress thread
  int32_t highest_ = kUncounted, waiting_ = 0;
  bool restarted_ = false, closed_ = false, woken_ = false;
  const bool talks_;
};

// The table with this id, which the caller keeps alive; nullptr if there is none.
std::shared_ptr<Table> At(int32_t id);

// The array of a program that receives the sums of a leaf.
struct Result {
  void* data;
  size_t bytes;
  bool doubles;  // float64, otherwise float32
  bool Widens(const Place& place) const { return doubles && place.item == sizeof(float); }
};
std::vector<Result> ResultsOf(ffi::RemainingRets rets);

// Where the leaves that a program posts go. Fails if they are not those of the layout.
const Place* CheckedLeaves(const Layout& layout, int32_t number, int32_t device,
                           ffi::RemainingArgs leaves);

// Where the sums of some leaves of a program are. Fails if they do not fit the exchange.
const Place* CheckedSums(const Layout& layout, const Slot* slot, int32_t device,
                         const std::vector<Result>& results, int32_t first, bool last);

// ToWire rounds numbers to `bits` bits as XLA does, and WireBytes returns the bytes that it writes.
// Both are in block_kernels.cc.
void ToWire(int64_t bits, const float* numbers, size_t size, char* to);
int64_t WireBytes(int64_t bits, size_t size);

// Tells the progress thread, which prints it and ends the job if other devices may be waiting.
ffi::Error Failed(Table* table, const std::string& message);

// Seconds of the clock that time.monotonic reads.
double Now();

// For a program with a table of another process.
constexpr char kForeign[] = "the program uses an exchange of another process";

// Pins memory for CUDA devices, and unpins it. Set by slots_cuda.cc.
extern bool (*pin_memory)(void*, size_t);
extern void (*unpin_memory)(void*);

// The signatures of the handlers, after a context if there is one.
template <typename Binding>
auto BindPost(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // token
      .template Arg<ffi::Buffer<ffi::S32>>()  // device
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .template Arg<ffi::Buffer<ffi::S32>>()  // step
      .template Arg<ffi::Buffer<ffi::F32>>()  // header
      .RemainingArgs()                        // leaves
      .template Ret<ffi::Buffer<ffi::S32>>()  // token
      .template Attr<int32_t>("table")
      .template Attr<int32_t>("layout");
}

// `first` is the index of the first leaf of the part that is read, and `last` whether no other part
// follows. `readers` is the number of devices that collect the exchange.
template <typename Binding>
auto BindCollect(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // token
      .template Arg<ffi::Buffer<ffi::S32>>()  // device
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .template Ret<ffi::Buffer<ffi::S32>>()  // token
      .template Ret<ffi::Buffer<ffi::F32>>()  // header
      .RemainingRets()                        // sums
      .template Attr<int32_t>("table")
      .template Attr<int32_t>("first")
      .template Attr<int32_t>("last")
      .template Attr<int32_t>("readers");
}

// Returns arguments in their places, as many as there are results. What uses a result comes after
// it, and it comes after what computes the arguments. Further arguments are copied to the results
// from the second one on.
template <typename Copy>
ffi::Error ReturnInPlace(ffi::RemainingArgs arguments, ffi::RemainingRets results, Copy copy) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool in_place = i < results.size();
    auto from = arguments.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(in_place ? i : i - results.size() + 1);
    if (from.has_error() || to.has_error() || from->size_bytes() != (*to)->size_bytes() ||
        (in_place && from->untyped_data() != (*to)->untyped_data())) {
      return ffi::Error::Internal("results of jdaso_order must be in the places of its arguments");
    }
    if (!in_place) copy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace jdaso

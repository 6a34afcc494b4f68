// Slots: exchanges of arrays between compiled programs and the progress thread, as data.
//
//     post (XLA's thread)      progress thread (Python)       collect (XLA's thread)
//     takes a free slot,  -->  handshake and all-reduce  -->  waits until the slot is done,
//     copies the leaves        in the slot's memory           copies the sums, frees it
//
// No handler calls Python or takes the interpreter lock. docs/develop/threads.md says whose the bytes
// of a slot are in each state, who waits for whom, and why waits cannot deadlock.
//
// A slot holds what this node has sent until it is collected, because a checkpoint saves it. A slot
// is forgotten when a program has gone back to an earlier state. It is then not found any more, and
// is freed when its owner is done with it.

#include "slots.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace jdaso {

namespace {

constexpr std::chrono::seconds kTelling{2};
constexpr char kClosed[] =
    "the exchange is closed, or the interpreter is exiting: no exchange can start or end";
constexpr size_t kPage = 4096, kRecords = 1000;

std::string Name(int32_t number) {
  return number == kUncounted ? "a consensus" : "exchange " + std::to_string(number);
}

std::string Filled(const std::string& text, int32_t number) {
  std::string result = text;
  const size_t at = result.find("{}");
  return at == std::string::npos ? result : result.replace(at, 2, Name(number));
}

}  // namespace

bool (*pin_memory)(void*, size_t) = nullptr;
void (*unpin_memory)(void*) = nullptr;

Block::Block(size_t size, bool pin) : bytes((size / kPage + 1) * kPage) {
  memory = static_cast<char*>(std::aligned_alloc(kPage, bytes));
  if (memory == nullptr) throw Failure("no memory for " + std::to_string(size) + " bytes");
  pinned = pin && pin_memory != nullptr && pin_memory(memory, bytes);
}

Block::~Block() {
  if (pinned) unpin_memory(memory);
  std::free(memory);
}

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// ---- Programs

int32_t Table::Register(Layout layout) {
  std::lock_guard<std::mutex> lock(mutex_);
  layouts_.push_back(std::move(layout));
  return static_cast<int32_t>(layouts_.size()) - 1;
}

// Makes two free slots with pinned memory, so that programs need not wait for it.
void Table::Reserve(int32_t layout) {
  const Layout& of = LayoutAt(layout);
  for (int i = 0; i < 2; ++i) {
    auto block = std::make_shared<Block>(of.bytes, true);
    std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_.emplace_back();
    slot.state = kFree, slot.block = std::move(block), slot.family = of.family;
  }
}

const Layout& Table::LayoutAt(int32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index < 0 || index >= static_cast<int32_t>(layouts_.size())) throw Failure(kForeign);
  return layouts_[index];
}

Slot* Table::BeginPost(int32_t number, int32_t step, const float* header, int32_t layout,
                       bool pin) {
  const bool counts = number != kUncounted;
  std::shared_ptr<Block> fresh;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (closed_) throw Failure(kClosed);
    Slot* slot = Find(number);
    if (slot != nullptr && slot->state == kFilling && slot->to_join > 0) {
      --slot->to_join;
      return slot;
    }
    if (slot != nullptr && slot->state == kFailed && !counts) throw Failure(slot->error);
    if ((slot != nullptr || (counts && number <= highest_)) && !restarted_) {
      throw Failure(Filled(posted_twice_, number));
    }
    if (counts) {
      // Posted exchanges with these numbers belong to a state that the program has discarded. One
      // with a lower number may still be collected by another device of this node.
      for (Slot& old : slots_) {
        if (old.state >= kFilled && old.number >= number) Retire(&old);
      }
    } else if (slot != nullptr) {
      Retire(slot);
    }
    if ((slot = Take(layouts_[layout], counts, fresh)) == nullptr) {
      // Without the mutex, because pinning may wait for a device, and that for a host function that
      // takes the mutex. The memory of a consensus is used once and not pinned.
      const int64_t bytes = layouts_[layout].bytes;
      lock.unlock();
      fresh = std::make_shared<Block>(bytes, pin && counts);
      lock.lock();
      continue;
    }
    if (counts) highest_ = number, restarted_ = false;
    slot->number = number, slot->step = step, slot->layout = layout, slot->state = kFilling;
    slot->parts_left = layouts_[layout].senders, slot->to_join = slot->parts_left - 1;
    slot->unpinned = pin && counts && !slot->block->pinned;
    std::memcpy(slot->header, header, sizeof(slot->header));
    slot->record->number = number, slot->record->step = step;
    slot->record->copy_to_host[0] = Now();
    return slot;
  }
}

// One device has filled its part. The last one gives the slot to the progress thread.
void Table::EndPost(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  slot->record->copy_to_host[1] = Now();
  if (--slot->parts_left > 0) return;
  slot->state = kFilled;
  filled_.push_back(slot);
  changed_.notify_all();
  WakeLocked();
}

// Copying the leaves has failed.
void Table::Discard(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot->state == kFilling) Free(slot);
  changed_.notify_all();
}

// Waits until an exchange is done. A slot that is being filled is waited for, and if several devices
// collect, also one that is unknown: the device that posts it may come after the others.
Slot* Table::BeginCollect(int32_t number, int32_t readers) {
  std::unique_lock<std::mutex> lock(mutex_);
  Slot* slot = nullptr;
  const auto known = [&] {
    slot = Find(number);
    return closed_ || (slot == nullptr ? readers == 1 : slot->state != kFilling);
  };
  changed_.wait_for(lock, patience_, known);
  if (slot != nullptr && slot->state == kFailed) {
    slot->awaited = 1;
    throw Failure(slot->error);
  }
  if (closed_) throw Failure(kClosed);
  if (slot == nullptr || slot->state == kFilling) throw Failure(Filled(not_in_flight_, number));
  slot->awaited = 1;
  const double since = Now();
  if (slot->state == kFilled) {
    ++slot->users, ++waiting_;
    WakeLocked();  // the progress thread polls more often from now on
    changed_.wait(lock, [&] { return closed_ || slot->state != kFilled; });
    --slot->users, --waiting_;
  }
  if (slot->state == kFailed) throw Failure(slot->error);
  if (slot->state != kDone) throw Failure(kClosed);
  ++slot->users;
  const double now = Now();
  if (slot->read_since == 0) slot->read_since = now;
  Record& record = *slot->record;
  if (record.wait[0] == 0 && number != kUncounted) {
    record.wait[0] = since, record.wait[1] = now;
    totals_[0] += 1, totals_[1] += record.bytes_sent;
    totals_[2] += record.wait[1] - record.wait[0];
    totals_[3] += record.transfer[1] - record.transfer[0];
    records_.push_back(slot->record);
    if (records_.size() > kRecords) records_.pop_front();
    if (talks_) WakeLocked();
  }
  return slot;
}

// One device reads its last part. The exchange is not in flight any more when all devices do.
void Table::Count(Slot* slot, int32_t readers) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (++slot->collected >= readers) slot->forgotten = true;
}

// One device has read a part of the sums.
void Table::EndCollect(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  --slot->users;
  if (!slot->forgotten) return;
  slot->record->copy_to_device[0] = slot->read_since, slot->record->copy_to_device[1] = Now();
  Retire(slot);
}

// ---- The progress thread

// The slot that was posted first of those that it has not got yet.
Slot* Table::Next() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (filled_.empty()) return nullptr;
  Slot* slot = filled_.front();
  filled_.pop_front();
  return slot;
}

void Table::Done(Slot* slot, const float* total, int64_t bytes_sent, double began, double ended) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::memcpy(slot->total, total, sizeof(slot->total));
  slot->record->bytes_sent = bytes_sent;
  slot->record->transfer[0] = began, slot->record->transfer[1] = ended;
  slot->state = kDone;
  if (slot->forgotten) Retire(slot);
  changed_.notify_all();
}

void Table::Fail(Slot* slot, const char* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  slot->error = error;
  slot->state = kFailed;
  if (slot->forgotten) Retire(slot);
  changed_.notify_all();
}

// Waits for news; whether there are some. A negative time is without limit.
bool Table::Wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto woken = [&] { return woken_; };
  if (seconds < 0) {
    news_.wait(lock, woken);
  } else {
    news_.wait_for(lock, std::chrono::duration<double>(seconds), woken);
  }
  return std::exchange(woken_, false);
}

// An error of a handler, each once; "" if there is none.
std::string Table::Problem() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (problems_taken_ > problems_told_) changed_.notify_all();
  problems_told_ = problems_taken_;  // the thread has told what it got before
  if (problems_.empty()) return "";
  std::string problem = std::move(problems_.front());
  problems_.pop_front();
  ++problems_taken_;
  return problem;
}

// ---- Any thread

void Table::Wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  WakeLocked();
}

// Waits until the progress thread has told the problem. Otherwise the program might fail, and end,
// before that, with an error in the words of XLA.
void Table::Report(const std::string& problem) {
  std::unique_lock<std::mutex> lock(mutex_);
  problems_.push_back(problem);
  WakeLocked();
  const int64_t own = problems_taken_ + static_cast<int64_t>(problems_.size());
  changed_.wait_for(lock, kTelling, [&] { return closed_ || problems_told_ >= own; });
}

// Adds to the number of those who wait for a result, and returns it.
int32_t Table::Hurry(int32_t change) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (change > 0) WakeLocked();
  return waiting_ += change;
}

// Waits until no slot is being filled. Returns kUncounted - 1, or the number of one that still is.
int32_t Table::AwaitPosted() {
  std::unique_lock<std::mutex> lock(mutex_);
  int32_t pending = kUncounted - 1;
  const auto posted = [&] {
    for (const Slot& slot : slots_) {
      if (slot.state == kFilling) return pending = slot.number, false;
    }
    return pending = kUncounted - 1, true;
  };
  changed_.wait_for(lock, patience_, posted);
  return pending;
}

// Waits until the progress thread owns no slot. Fails with the error of one that has failed.
void Table::AwaitDone() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  for (Slot& slot : slots_) slot.awaited |= slot.state == kFilled;
  WakeLocked();
  changed_.wait(lock, [&] {
    for (const Slot& slot : slots_) {
      if (slot.state == kFilled) return false;
    }
    return true;
  });
  --waiting_;
  for (const Slot& slot : slots_) {
    if (slot.state == kFailed) throw Failure(slot.error);
  }
}

// The slots that are posted and not collected, by number. Each needs a Release.
std::vector<Slot*> Table::InFlight() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Slot*> found;
  for (Slot& slot : slots_) {
    if (slot.state >= kFilled && !slot.forgotten && slot.number != kUncounted) {
      ++slot.users;
      found.push_back(&slot);
    }
  }
  std::sort(found.begin(), found.end(), [](Slot* a, Slot* b) { return a->number < b->number; });
  return found;
}

void Table::Release(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  --slot->users;
  if (slot->forgotten) Retire(slot);
}

// Allows the numbers of exchanges to start again, once.
void Table::Restart() {
  std::lock_guard<std::mutex> lock(mutex_);
  restarted_ = true;
}

// Forgets all posted exchanges. Numbers may start again.
void Table::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.state >= kFilled) Retire(&slot);
  }
  highest_ = kUncounted;
}

// Fails all handlers, now and later. What is filled still becomes done.
void Table::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  WakeLocked();
}

// The last exchanges that were collected, and the sums over all.
std::vector<Record> Table::Records(double* totals) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Record> records;
  for (const auto& record : records_) records.push_back(*record);
  std::copy_n(totals_, 4, totals);
  return records;
}

// ---- With the mutex

Slot* Table::Find(int32_t number) {
  for (Slot& slot : slots_) {
    if (slot.state != kFree && !slot.forgotten && slot.number == number) return &slot;
  }
  return nullptr;
}

// A free slot with memory for a layout, if need be the fresh one; nullptr if there is none. Memory of
// another wire of the same leaves will not be needed again soon, so it is given back, unless it is
// pinned: unpinning may wait for a device.
Slot* Table::Take(const Layout& layout, bool reuse, std::shared_ptr<Block> fresh) {
  Slot *found = nullptr, *empty = nullptr;
  for (Slot& slot : slots_) {
    if (slot.state != kFree) continue;
    if (reuse && slot.block && slot.family == layout.family) {
      const bool fits = slot.block->bytes / kPage == static_cast<size_t>(layout.bytes) / kPage + 1;
      if (fits && found == nullptr) {
        found = &slot;
      } else if (!fits && !slot.block->pinned) {
        slot.block.reset();
      }
    }
    if (!slot.block && empty == nullptr) empty = &slot;
  }
  if (found == nullptr) {
    if (!fresh) return nullptr;
    found = empty != nullptr ? empty : &slots_.emplace_back();
    found->block = std::move(fresh);
  }
  found->family = reuse ? layout.family : -1;
  found->memory = found->block->memory;
  found->collected = found->users = found->awaited = 0;
  found->forgotten = false, found->read_since = 0;
  found->record = std::make_shared<Record>();
  return found;
}

// The exchange is not found any more. Its slot is free when nobody uses it.
void Table::Retire(Slot* slot) {
  slot->forgotten = true;
  if (slot->users == 0 && slot->state != kFilled && slot->state != kFree) Free(slot);
}

void Table::Free(Slot* slot) {
  // Messages may still arrive in the memory of an exchange that has failed.
  if (slot->state == kFailed) kept_.push_back(slot->block);
  if (slot->state == kFailed || slot->number == kUncounted) slot->block.reset();
  slot->state = kFree;
  slot->forgotten = false;
}

void Table::WakeLocked() {
  woken_ = true;
  news_.notify_one();
}

// ---- Handlers

std::vector<Result> ResultsOf(ffi::RemainingRets rets) {
  std::vector<Result> results;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto ret = *rets.get<ffi::AnyBuffer>(i);
    results.push_back({ret->untyped_data(), ret->size_bytes(), ret->element_type() == ffi::F64});
  }
  return results;
}

const Place* CheckedLeaves(const Layout& layout, int32_t number, int32_t device,
                           ffi::RemainingArgs leaves) {
  if (static_cast<size_t>(layout.leaves) != leaves.size()) {
    throw Failure(Name(number) + " has " + std::to_string(layout.leaves) +
                  " leaves, the program posts " + std::to_string(leaves.size()));
  }
  const Place* places = layout.of(device);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto leaf = *leaves.get<ffi::AnyBuffer>(i);
    const bool rounds = places[i].bits && leaf.element_type() == ffi::F32;
    const auto size = rounds ? WireBytes(places[i].bits, leaf.element_count())
                             : static_cast<int64_t>(leaf.size_bytes());
    if (size != places[i].wire_bytes) {
      throw Failure("leaf " + std::to_string(i) + " of " + Name(number) + " has " +
                    std::to_string(places[i].wire_bytes) + " bytes, the program posts " +
                    std::to_string(size));
    }
  }
  return places;
}

const Place* CheckedSums(const Layout& layout, const Slot* slot, int32_t device,
                         const std::vector<Result>& results, int32_t first, bool last) {
  const int32_t end = first + static_cast<int32_t>(results.size());
  const std::string exchange = Name(slot->number);
  if (last ? end != layout.leaves : end > layout.leaves) {
    throw Failure(exchange + " has " + std::to_string(layout.leaves) +
                  " leaves, the program copies " + std::to_string(end));
  }
  const Place* places = layout.of(device) + first;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto size = static_cast<int64_t>(results[i].bytes / (results[i].Widens(places[i]) ? 2 : 1));
    if (size < places[i].least_bytes || size > places[i].most_bytes) {
      throw Failure("leaf " + std::to_string(first + i) + " of " + exchange + " has " +
                    std::to_string(places[i].most_bytes) + " bytes, the program copies " +
                    std::to_string(size));
    }
  }
  return places;
}

ffi::Error Failed(Table* table, const std::string& message) {
  const std::string text = "JdasoError: " + message;
  if (message != kClosed) table->Report(text);
  return ffi::Error::Internal(text);
}

namespace {

// Copies the leaves that this device sends to a slot, or zeros if this node does not contribute.
ffi::Error Post(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> step,
                ffi::Buffer<ffi::F32> header, ffi::RemainingArgs leaves,
                ffi::Result<ffi::Buffer<ffi::S32>> done, int32_t id, int32_t layout) {
  const auto table = At(id);
  if (!table) return ffi::Error::Internal(kForeign);
  try {
    const float* sent = header.typed_data();
    const int32_t k = *number.typed_data();
    const Place* place =
        CheckedLeaves(table->LayoutAt(layout), k, *device.typed_data(), leaves);
    Slot* slot = table->BeginPost(k, *step.typed_data(), sent, layout, false);
    for (size_t i = 0; i < leaves.size(); ++i, ++place) {
      if (std::max(k, 0) % place->copies != place->copy) continue;
      const auto leaf = *leaves.get<ffi::AnyBuffer>(i);
      char* to = slot->memory + place->sent;
      if (!(sent[0] > 0)) {
        std::memset(to, 0, place->wire_bytes);
      } else if (place->bits && leaf.element_type() == ffi::F32) {
        ToWire(place->bits, static_cast<const float*>(leaf.untyped_data()), leaf.element_count(), to);
      } else {
        std::memcpy(to, leaf.untyped_data(), place->wire_bytes);
      }
    }
    table->EndPost(slot);
    *done->typed_data() = *token.typed_data();
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    return Failed(table.get(), failure.what());
  }
}

// Waits until an exchange is done, and copies a part of its sums, and its header, to the program.
ffi::Error Collect(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                   ffi::Buffer<ffi::S32> number, ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets rets,
                   int32_t id, int32_t first, int32_t last, int32_t readers) {
  const auto table = At(id);
  if (!table) return ffi::Error::Internal(kForeign);
  Slot* slot = nullptr;
  try {
    slot = table->BeginCollect(*number.typed_data(), readers);
    const std::vector<Result> results = ResultsOf(rets);
    const Place* place =
        CheckedSums(table->LayoutAt(slot->layout), slot, *device.typed_data(), results, first, last);
    if (last) table->Count(slot, readers);
    for (const Result& result : results) {
      const char* from = slot->memory + place->sums;
      if (result.Widens(*place)) {
        const auto* floats = reinterpret_cast<const float*>(from);
        std::copy_n(floats, result.bytes / sizeof(double), static_cast<double*>(result.data));
      } else {
        std::memcpy(result.data, from, result.bytes);
      }
      ++place;
    }
    std::memcpy(header->typed_data(), slot->total, sizeof(slot->total));
    *done->typed_data() = *token.typed_data();
    table->EndCollect(slot);
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    if (slot != nullptr) table->EndCollect(slot);
    return Failed(table.get(), failure.what());
  }
}

ffi::Error Order(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return ReturnInPlace(arguments, results, std::memcpy);
}

// Programs name a table by its id, because a pointer would be stale in a program from JAX's
// persistent cache. Handlers hold a reference, so a table outlives the calls in it. The registry is
// never destroyed, because XLA's threads may outlive main.
auto& tables_mutex = *new std::mutex;
auto& tables = *new std::map<int32_t, std::shared_ptr<Table>>;

// Calls a function, and writes the text of its failure to `error`.
template <typename Function>
auto Guarded(char* error, size_t size, Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), size - 1);
    return {};
  }
}

}  // namespace

std::shared_ptr<Table> At(int32_t id) {
  std::lock_guard<std::mutex> lock(tables_mutex);
  const auto found = tables.find(id);
  return found == tables.end() ? nullptr : found->second;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_post, Post, BindPost(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_collect, Collect, BindCollect(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_order, Order, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

// ---- What slots.py calls, by ctypes, which releases the interpreter lock

extern "C" {

int32_t jdaso_header() { return kHeader; }

int32_t jdaso_open(const char* posted_twice, const char* not_in_flight, double patience,
                   bool talks) {
  std::lock_guard<std::mutex> lock(tables_mutex);
  static int32_t id = 0;
  tables[id] = std::make_shared<Table>(posted_twice, not_in_flight, patience, talks);
  return id++;
}

void jdaso_free(int32_t id) {
  std::lock_guard<std::mutex> lock(tables_mutex);
  tables.erase(id);
}

int32_t jdaso_layout(int32_t id, int32_t senders, int32_t leaves, int64_t bytes, int64_t family,
                     const Place* places, int64_t count) {
  return At(id)->Register({senders, leaves, bytes, family, {places, places + count}});
}

bool jdaso_reserve(int32_t id, int32_t layout, char* error, size_t size) {
  return Guarded(error, size, [&] { return At(id)->Reserve(layout), true; });
}

Slot* jdaso_begin_post(int32_t id, int32_t number, int32_t step, const float* header,
                       int32_t layout, char* error, size_t size) {
  return Guarded(error, size, [&] { return At(id)->BeginPost(number, step, header, layout, false); });
}
void jdaso_end_post(int32_t id, Slot* slot) { At(id)->EndPost(slot); }
void jdaso_discard(int32_t id, Slot* slot) { At(id)->Discard(slot); }

Slot* jdaso_begin_collect(int32_t id, int32_t number, int32_t readers, char* error, size_t size) {
  return Guarded(error, size, [&] { return At(id)->BeginCollect(number, readers); });
}
void jdaso_end_collect(int32_t id, Slot* slot, int32_t readers, bool last) {
  if (last) At(id)->Count(slot, readers);
  At(id)->EndCollect(slot);
}

// A reference to the memory of a slot, which jdaso_let_go drops.
void* jdaso_hold(Slot* slot, char** memory, int64_t* bytes) {
  *memory = slot->memory, *bytes = slot->block->bytes;
  return new std::shared_ptr<Block>(slot->block);
}
void jdaso_let_go(void* held) { delete static_cast<std::shared_ptr<Block>*>(held); }

Slot* jdaso_next(int32_t id) { return At(id)->Next(); }
void jdaso_done(int32_t id, Slot* slot, const float* total, int64_t bytes_sent, double began,
                double ended) {
  At(id)->Done(slot, total, bytes_sent, began, ended);
}
void jdaso_fail(int32_t id, Slot* slot, const char* error) { At(id)->Fail(slot, error); }
bool jdaso_wait(int32_t id, double seconds) { return At(id)->Wait(seconds); }
bool jdaso_problem(int32_t id, char* text, size_t size) {
  const std::string problem = At(id)->Problem();
  std::strncpy(text, problem.c_str(), size - 1);
  return !problem.empty();
}

void jdaso_wake(int32_t id) { At(id)->Wake(); }
int32_t jdaso_hurry(int32_t id, int32_t change) { return At(id)->Hurry(change); }
int32_t jdaso_await_posted(int32_t id) { return At(id)->AwaitPosted(); }
bool jdaso_await_done(int32_t id, char* error, size_t size) {
  return Guarded(error, size, [&] { return At(id)->AwaitDone(), true; });
}
int32_t jdaso_in_flight(int32_t id, Slot** slots, int32_t most) {
  const std::vector<Slot*> found = At(id)->InFlight();
  for (size_t i = most; i < found.size(); ++i) At(id)->Release(found[i]);
  std::copy_n(found.begin(), std::min<size_t>(found.size(), most), slots);
  return static_cast<int32_t>(found.size());
}
void jdaso_release(int32_t id, Slot* slot) { At(id)->Release(slot); }
void jdaso_restart(int32_t id) { At(id)->Restart(); }
void jdaso_clear(int32_t id) { At(id)->Clear(); }
void jdaso_close(int32_t id) { At(id)->Close(); }
int32_t jdaso_records(int32_t id, Record* records, double* totals) {
  const std::vector<Record> found = At(id)->Records(totals);
  std::copy(found.begin(), found.end(), records);
  return static_cast<int32_t>(found.size());
}

}  // extern "C"

}  // namespace jdaso

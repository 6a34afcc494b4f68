// Slots under a sanitizer, without XLA and MPI: three devices, two exchanges in flight, and a thread
// that saves what is in flight.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "slots.h"

namespace jdaso {
// Those of block_kernels.cc are chosen by the loader, which a sanitizer does not permit.
void ToWire(int64_t, const float*, size_t, char*) { std::abort(); }
int64_t WireBytes(int64_t, size_t) { std::abort(); }
}  // namespace jdaso

namespace {

using namespace jdaso;

constexpr int kParts = 3, kRounds = 3000, kBytes = 256;

void Require(bool condition, const char* text) {
  if (condition) return;
  std::puts(text);
  std::abort();
}

// What a device sends of an exchange.
char Byte(int number) { return static_cast<char>(number % 100); }

}  // namespace

int main() {
  Table table("{} was posted twice", "{} is not in flight", 5.0, true);
  Layout layout{kParts, 1, 2 * kParts * kBytes, 0, {}};
  for (int64_t part = 0; part < kParts; ++part) {
    const int64_t sent = part * kBytes, sums = (kParts + part) * kBytes;
    layout.places.push_back({sent, kBytes, sums, kBytes, kBytes, 0, 4, 0, 1});
  }
  const int32_t index = table.Register(layout);
  std::atomic<bool> ended{false};
  std::thread progress([&] {  // adds 1 to each byte
    const float total[kHeader] = {kParts};
    while (!ended) {
      table.Wait(0.01);
      while (Slot* slot = table.Next()) {
        for (int k = 0; k < kParts * kBytes; ++k) {
          slot->memory[kParts * kBytes + k] = static_cast<char>(slot->memory[k] + 1);
        }
        table.Done(slot, total, kBytes, 0.0, 0.0);
      }
    }
  });
  std::thread saves([&] {
    while (!ended) {
      table.AwaitPosted();
      for (Slot* slot : table.InFlight()) {
        for (int k = 0; k < kParts * kBytes; ++k) {
          Require(slot->memory[k] == Byte(slot->number), "what was sent has changed");
        }
        table.Release(slot);
      }
      double totals[4];
      table.Records(totals);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  for (int run = 0; run < 2; ++run) {  // numbers start again
    table.Restart();
    std::vector<std::thread> devices;
    for (int device = 0; device < kParts; ++device) {
      devices.emplace_back([&, device] {
        const float header[kHeader] = {1};
        const auto collect = [&](int number) {
          Slot* slot = table.BeginCollect(number, kParts);
          const Place* place = CheckedSums(table.LayoutAt(slot->layout), slot, device, {{nullptr, kBytes, false}}, 0, true);
          table.Count(slot, kParts);
          for (int k = 0; k < kBytes; ++k) {
            Require(slot->memory[place->sums + k] == Byte(number) + 1, "a sum is wrong");
          }
          table.EndCollect(slot);
        };
        for (int number = 0; number < kRounds; ++number) {
          Slot* slot = table.BeginPost(number, number, header, index, false);
          const Place* place = table.LayoutAt(slot->layout).of(device);
          std::memset(slot->memory + place->sent, Byte(number), kBytes);
          table.EndPost(slot);
          if (number > 0) collect(number - 1);
        }
        collect(kRounds - 1);
      });
    }
    for (std::thread& device : devices) device.join();
  }
  ended = true;
  progress.join();
  saves.join();
  std::puts("ok");
}

// Memory that a function keeps from call to call.
#pragma once

#include <cstdint>
#include <vector>

namespace rhizome {

// Room for `count` numbers in `memory`, aligned to 64 bytes; it grows where it must.
template <class Element>
inline Element* room_in(std::vector<Element>& memory, int64_t count) {
  constexpr int64_t kSpare = 64 / sizeof(Element);
  if (static_cast<int64_t>(memory.size()) < count + kSpare) memory.resize(count + kSpare);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / sizeof(Element);
}

}  // namespace rhizome

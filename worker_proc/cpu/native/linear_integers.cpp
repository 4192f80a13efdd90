#include "linear_integers.h"

namespace rhizome {

#if defined(RHIZOME_INTEGERS)
namespace {

// Calls run(Codes(...)) with those of two vectors from `tile` on.
template <class Run>
void with_codes(const IntegerPlace& place, int tile, Run run) {
  const PackedMatrix& weights = place.weights;
  if (weights.format == Format::kInt4) return run(CodesInPassing<CodeKind::kNibbles>(place, tile));
  if (weights.format == Format::kFloat4) return run(CodesInPassing<CodeKind::kFloat4>(place, tile));
  if (weights.zeros != nullptr) return run(CodesInPassing<CodeKind::kUnsigned>(place, tile));
  run(CodesInPassing<CodeKind::kSigned>(place, tile));
}

// One pass of kRows rows.
template <int kRows>
void pass_of(const IntegerPlace& place, const IntegerRows& rows, const int16_t* wide, LinesAhead& ahead) {
  if (wide != nullptr) {
    for (int tile = 0; tile < 2; tile += kWideTiles)
      integer_tiles<kRows, kWideTiles>(place, tile, rows, WideCodes(wide + tile * place.now * kTileElements), ahead);
    return;
  }
  for (int tile = 0; tile < 2; tile += kIntegerTiles<kRows>)
    with_codes(place, tile, [&](const auto& codes) {
      integer_tiles<kRows, kIntegerTiles<kRows>>(place, tile, rows, codes, ahead);
    });
}

template <int... kCounts>
void pass_in(const IntegerPlace& place, int count, const IntegerRows& rows, const int16_t* wide, LinesAhead& ahead,
             std::integer_sequence<int, kCounts...>) {
  using Pass = void (*)(const IntegerPlace&, const IntegerRows&, const int16_t*, LinesAhead&);
  static constexpr Pass kPasses[] = {pass_of<kCounts + 1>...};
  kPasses[count - 1](place, rows, wide, ahead);
}

template <class Codes, int... kPairs>
int16_t* put_pairs(const Codes& codes, shorts less, int16_t* out, std::integer_sequence<int, kPairs...>) {
  shorts* const to = reinterpret_cast<shorts*>(out);
  ((to[2 * kPairs] = codes.template numbers<kPairs>(0) - less, to[2 * kPairs + 1] = codes.template numbers<kPairs>(1) - less), ...);
  return out + 8 * kPairLanes;
}

}  // namespace

void integer_pass(const IntegerPlace& place, int count, const IntegerRows& rows, const int16_t* wide, LinesAhead& ahead) {
  pass_in(place, count, rows, wide, ahead, std::make_integer_sequence<int, kIntegerRows>());
}

void widen_integers(const IntegerPlace& place, int16_t* out) {
  const Format format = place.weights.format;
  const int16_t middle = in_nibbles(format) && place.weights.zeros == nullptr ? middle_number(format) : 0;
  const shorts less = shorts{} + middle;
  for (int tile = 0; tile < 2; tile += kWideTiles)
    with_codes(place, tile, [&](auto codes) {
      for (int64_t step = 0; step < place.now; ++step, codes.next_block())
        for (int four = 0; four < 4; ++four, codes.next_four())
          out = put_pairs(codes, less, out, std::make_integer_sequence<int, 4>());
    });
}
#endif

}  // namespace rhizome

int rhizome_exact(int format) { return rhizome::in_quads(static_cast<rhizome::Format>(format)); }

int rhizome_integers() {
#if defined(RHIZOME_INTEGERS)
  return 1;
#else
  return 0;
#endif
}

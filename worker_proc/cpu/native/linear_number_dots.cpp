#include "linear_number_dots.h"

namespace rhizome {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
namespace {

// Calls dots(...) of what `place` has, as number_dots says.
template <Format kFormat, class Dots>
void with_blocks(const NumberPlace& place, bf16* plain, bool keep, bool kept, Dots dots) {
  const uint8_t* const codes = codes_at(place.weights, place.panel, place.step);
  if (kept) return dots(PlainBlocks<most_kept(kFormat)>(plain));
  if (keep) return dots(NumberBlocks<kFormat, true>(codes, plain));
  dots(NumberBlocks<kFormat, false>(codes, plain));
}

template <Format kFormat, CodeZeros kZeros, ScaleForm kForm = ScaleForm::kFloat32>
void group_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain, bool keep, bool kept) {
  const auto run = [&]<class Blocks>(const Blocks& from) {
    dots(count, GroupDots<kFormat, kZeros, kForm, Blocks>{place, from}, rows, place.now, ahead);
  };
  if constexpr (kForm == ScaleForm::kFloat32)  // which others have become where there are several passes
    with_blocks<kFormat>(place, plain, keep, kept, run);
  else
    run(NumberBlocks<kFormat, false>(codes_at(place.weights, place.panel, place.step), plain));
}

template <Format kFormat>
void channel_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain, bool keep, bool kept) {
  with_blocks<kFormat>(place, plain, keep, kept, [&]<class Blocks>(const Blocks& from) {
    dots(count, ChannelDots<Blocks>{from}, rows, place.now, ahead);
  });
}

}  // namespace

void number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain, bool keep, bool kept) {
  const auto run = [&](auto of) { of(place, count, rows, ahead, plain, keep, kept); };
  const PackedMatrix& weights = place.weights;
  const bool zeros = weights.zeros != nullptr;
  using enum CodeZeros;
  switch (weights.format) {
    case Format::kInt8Both:
    case Format::kInt8Channel:
#if defined(RHIZOME_INT8_DOTS)
      return;  // are bytes there (`in_quads`)
#else
      return run(channel_dots<Format::kInt8Channel>);
#endif
    case Format::kFloat8Channel: return run(channel_dots<Format::kFloat8Channel>);
    case Format::kFloat8: return run(group_dots<Format::kFloat8, kMiddle>);
    case Format::kFloat4: return run(group_dots<Format::kFloat4, kMiddle>);
    case Format::kInt8:
      if (weights.scale_form == ScaleForm::kFloat16) return run(group_dots<Format::kInt8, kMiddle, ScaleForm::kFloat16>);
      return run(zeros ? group_dots<Format::kInt8, kZeros> : group_dots<Format::kInt8, kMiddle>);
    case Format::kInt4: break;
    case Format::kInt4Segments:
    case Format::kInt8Segments:
    case Format::kFloat4Segments:
    case Format::kBFloat16:
    case Format::kCompressed: return;
  }
  switch (weights.scale_form) {
    case ScaleForm::kFloat32: return run(zeros ? group_dots<Format::kInt4, kZeros> : group_dots<Format::kInt4, kMiddle>);
    case ScaleForm::kFloat16: return run(group_dots<Format::kInt4, kMiddle, ScaleForm::kFloat16>);
    case ScaleForm::kFactors: return run(group_dots<Format::kInt4, kBelow, ScaleForm::kFactors>);
    case ScaleForm::kLess: return run(group_dots<Format::kInt4, kBelow>);
  }
}
#endif

}  // namespace rhizome

// Two results of a row, packed. Exponents and reciprocals take the longest of what follows the products, so
// both share a reciprocal, that of 2^126 at most: gates below -43.5 count as that, and give 6e-18 of up at
// most.
DEV u32 gate_two(float gate, float next_gate, float up, float next_up) {
  constexpr float factor = -1.4426950408889634f;  // to base 2
  gate = max_or_nan(gate, -43.5f), next_gate = max_or_nan(next_gate, -43.5f);
  const float below = 1 + exp2_fast(gate * factor), next_below = 1 + exp2_fast(next_gate * factor);
  const float inverse = reciprocal(below * next_below);
  return pack(gate * up * (next_below * inverse), next_gate * next_up * (below * inverse));
}

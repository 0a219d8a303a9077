// The stage of the ring that is next, and the parity of the "full" barrier that it completes.
struct Place {
  int stage = 0;
  u32 parity = 0;
  DEV void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  DEV void skip(int steps) {
    stage += steps;
    parity ^= stage / STAGES & 1;
    stage %= STAGES;
  }
};

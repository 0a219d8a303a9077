// Behind attention.cu: what a test calls. Returns an empty string, or what went wrong.

static const Params* emulated_params;

extern "C" const char* run_emulated(const void* params, int blocks, unsigned shared_bytes, unsigned seed) {
  emulated_params = (const Params*)params;
  emulated::failure.clear();
  emulated::dice.seed(seed);
  emulated::blocks = blocks;
  emulated::body = [] { attend_chunks(*emulated_params); };
  for (emulated::block = 0; emulated::block < blocks && emulated::failure.empty(); ++emulated::block)
    emulated::run_block((WARPGROUPS + 1) * 128, shared_bytes);
  return emulated::failure.c_str();
}
extern "C" unsigned size_of_params() { return sizeof(Params); }

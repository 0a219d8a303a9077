// Behind attention.cu: what a test calls. Returns an empty string, or what went wrong. The blocks run one
// after another, the last one first: a block waits for those behind it.

static const Params* emulated_params;

extern "C" const char* run_emulated(const void* params, int blocks, unsigned shared_bytes, unsigned seed,
                                    const void* written, int num_written) {
  emulated_params = (const Params*)params;
  emulated::failure.clear();
  emulated::dice.seed(seed);
  emulated::blocks = blocks;
  emulated::written = (const emulated::Written*)written;
  emulated::num_written = num_written;
  emulated::words_stored = 0;
  emulated::body = [] { attend_decodes(*emulated_params); };
  for (emulated::block = blocks - 1; emulated::block >= 0 && emulated::failure.empty(); --emulated::block) {
    emulated::forget_predecessor();
    emulated::run_block(THREADS, shared_bytes);
  }
  return emulated::failure.c_str();
}
// In memory, by the last run: of outputs and of newest keys and values.
extern "C" unsigned count_stored_words() { return (unsigned)emulated::words_stored; }
extern "C" unsigned size_of_params() { return sizeof(Params); }

// Behind the kernel: what a test calls. Returns an empty string, or what went wrong.

static const Params* emulated_params;

extern "C" const char* run_emulated(const void* params, unsigned shared_bytes, unsigned seed) {
  emulated_params = (const Params*)params;
  emulated::failure.clear();
  emulated::dice.seed(seed);
  emulated::body = [] { tape_step(*emulated_params); };
  emulated::run(CTAS, NUM_THREADS, shared_bytes);
  for (const auto& thread : emulated::threads)
    if (emulated::failure.empty() && !thread->done) emulated::failure = "deadlock";
  for (const emulated::Block& block : emulated::blocks)
    for (const auto& [address, barrier] : block.barriers)
      if (emulated::failure.empty() && barrier.bytes) emulated::failure = "a copy that nobody has waited for";
  return emulated::failure.c_str();
}
extern "C" unsigned size_of_params() { return sizeof(Params); }

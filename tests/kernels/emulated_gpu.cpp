// Behind megakernel.cu: memory of a block, and the launch.

thread_local char room[ROOM] __attribute__((aligned(128)));

void cluster_barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
        std::atomic<u64> &arrived = emulated::block->cluster->arrived;
        const u64 goal = arrived++ / SPLIT * SPLIT + SPLIT;
        while (arrived < goal) emulated::wait_for_another();
    }
    __syncthreads();
}
void store_in_first_block(float4 *to, float4 value, u64 *barrier) {
    const emulated::Cluster &cluster = *emulated::block->cluster;
    memcpy(cluster.room + ((char *)to - room), &value, sizeof(value));
    std::lock_guard<std::mutex> lock(emulated::barriers);
    emulated::Barrier *at = emulated::barrier_at(cluster.barriers + (barrier - arrived));
    at->bytes -= sizeof(value), at->advance();
}

namespace emulated {
void run_thread(u32 low, u32 high) {
    step(*(const Params *)((u64)high << 32 | low));
    now().is_done = true;
    _longjmp(block->scheduler, 1);
}

// Returns false if the threads wait without end.
bool run_block(const Params &params, int number, Cluster *cluster, std::atomic<int> &ready) {
    Block made{};
    std::vector<Thread> threads(COUNT);
    memset(room, 0xff, ROOM);
    block = &made, made.index = {number}, made.threads = threads.data(), made.cluster = cluster;
    made.begun = std::chrono::steady_clock::now();
    if (number % SPLIT == 0) cluster->room = room, cluster->barriers = arrived;
    for (ready++; ready < GRID;) std::this_thread::yield();
    volatile int left = COUNT;
    for (int i = 0; i < COUNT; i++) threads[i].index = {i}, threads[i].stack.reset(new char[STACK]);
    for (volatile u64 turn = 0; left; turn = turn + 1) {
        for (volatile int i = 0; i < COUNT; i = i + 1) {
            Thread &thread = threads[i];
            if (thread.is_done) continue;
            made.current = i;
            if (_setjmp(made.scheduler)) {
                left = left - threads[i].is_done;
                continue;
            }
            if (thread.has_begun) _longjmp(thread.at, 1);
            thread.has_begun = true;
            getcontext(&thread.begin);
            thread.begin.uc_stack.ss_sp = thread.stack.get(), thread.begin.uc_stack.ss_size = STACK, thread.begin.uc_link = nullptr;
            const u64 address = (u64)&params;
            makecontext(&thread.begin, (void (*)())run_thread, 2, (u32)address, (u32)(address >> 32));
            setcontext(&thread.begin);
        }
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - made.begun;
        if (turn % 1024 == 1023 && passed.count() > LIMIT) return false;
    }
    return true;
}
}  // namespace emulated

extern "C" int run(const Params *params) {
    std::vector<emulated::Cluster> clusters(GRID / SPLIT);
    std::vector<std::thread> blocks;
    std::atomic<int> ready{0}, failed{0};
    for (int i = 0; i < GRID; i++)
        blocks.emplace_back([&, i] { failed += !emulated::run_block(*params, i, &clusters[i / SPLIT], ready); });
    for (std::thread &one : blocks) one.join();
    return failed;
}

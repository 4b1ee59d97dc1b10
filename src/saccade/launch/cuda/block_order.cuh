// The problem and block that a thread block takes, if block 0 of a problem may take much longer than the others.
#pragma once

// Thread block `index` of `blocks` for each of some problems. Block 0, which a block mask may show all tiles (BigBird's global block), takes as
// long as dozens of others. Those of the last `early` problems come first, so that none of them runs alone at the end; all other blocks are
// ordered by problems, whose operands then stay in L2.
__device__ __forceinline__ void order_blocks(int index, int problems, int blocks, int early, int& problem, int& block) {
    early = min(early, problems);
    int late = problems - early;
    if (index < early) {
        problem = late + index;
        block = 0;
    } else if (index - early < late * blocks) {
        problem = (index - early) / blocks;
        block = (index - early) % blocks;
    } else {
        index -= early + late * blocks;
        problem = late + index / (blocks - 1);
        block = 1 + index % (blocks - 1);
    }
}

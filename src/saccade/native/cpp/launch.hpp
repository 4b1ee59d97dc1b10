// A launch of a kernel through the driver, which is found by name: no CUDA headers are used, so this builds with any torch, even a CPU build.
#pragma once

#include <dlfcn.h>
#include <algorithm>
#include <cstdint>
#include <vector>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace {

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;
    int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
    int (*current_stream)(int32_t, void**) = nullptr;  // torch's current stream of a device
    int (*captures)(void*, int*) = nullptr;  // whether a stream is captured in a CUDA graph: 0 for no
    int (*context)(void**) = nullptr;
    int (*retain)(void**, int) = nullptr;
    int (*enter)(void*) = nullptr;

    void find() {
        if (void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
            launch = reinterpret_cast<decltype(launch)>(dlsym(cuda, "cuLaunchKernel"));
            encode = reinterpret_cast<decltype(encode)>(dlsym(cuda, "cuTensorMapEncodeTiled"));
            captures = reinterpret_cast<decltype(captures)>(dlsym(cuda, "cuStreamIsCapturing"));
            context = reinterpret_cast<decltype(context)>(dlsym(cuda, "cuCtxGetCurrent"));
            retain = reinterpret_cast<decltype(retain)>(dlsym(cuda, "cuDevicePrimaryCtxRetain"));
            enter = reinterpret_cast<decltype(enter)>(dlsym(cuda, "cuCtxSetCurrent"));
        }
        current_stream = reinterpret_cast<decltype(current_stream)>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }

    // a new thread, of autograd or of a user, has no context yet, and the driver cannot launch without one
    void make_current(int device) const {
        void* now = nullptr;
        if (!context || (context(&now) == 0 && now)) return;
        TORCH_CHECK(retain(&now, device) == 0 && enter(now) == 0, "no CUDA context for device ", device);
    }
} driver;

// The numbers of a ragged call that change from batch to batch, in the order of their slots in `saccade.native.described`.
struct Ragged {
    enum { QUERIES, KEYS, SEQUENCES, LONGEST_Q, LONGEST_K, ROWS_OF_16_BYTES, HALVINGS, COUNT };
    int64_t numbers[COUNT] = {};

    // a size, or the number for which it stands
    int64_t extent(int64_t size) const { return size < -1 ? numbers[-2 - size] : size; }
    int64_t longest() const { return std::max(numbers[LONGEST_Q], numbers[LONGEST_K]); }
};

// One argument of a kernel: the address of a tensor plus an offset, or a number of up to eight bytes.
struct Argument {
    int slot;  // of the tensor; -1 for a number; -2 - i for number i of a ragged call, to which the value is added
    int64_t value;
};

// A tensor of 16-bit numbers as the copy engine of sm_90 sees it (`saccade.nvrtc.tensor_map`), contiguous dimension first. The driver encodes the map
// again at each launch, because it holds the address.
struct Moved {
    Argument at;
    std::vector<int64_t> sizes;  // -2 - i for number i of a ragged call
    std::vector<uint64_t> strides;
    std::vector<uint32_t> box;

    void encode(int64_t address, const Ragged& ragged, void* into) const {
        constexpr int BFLOAT16 = 9, SWIZZLE_64 = 2, SWIZZLE_128 = 3, PROMOTE_L2_256 = 3;  // of the driver's enumerations
        const uint32_t ones[5] = {1, 1, 1, 1, 1};
        uint64_t extents[5];
        for (size_t i = 0; i < sizes.size(); ++i) extents[i] = static_cast<uint64_t>(ragged.extent(sizes[i]));
        int status = driver.encode(into, BFLOAT16, static_cast<uint32_t>(sizes.size()), reinterpret_cast<void*>(address + at.value), extents,
                                   strides.data(), box.data(), ones, 0, box[0] == 64 ? SWIZZLE_128 : SWIZZLE_64, PROMOTE_L2_256, 0);
        TORCH_CHECK(status == 0, "the driver refuses a tensor map: error ", status);
    }
};

// The parameters of a kernel are its tensor maps, then its other arguments.
struct Launch {
    static constexpr int MOST = 96, MOST_MAPS = 8;
    void* function;
    unsigned grid[3];
    unsigned threads, shared_bytes;
    std::vector<Argument> arguments;
    std::vector<Moved> moved;
    int64_t per_sequence = 0;  // of a ragged call: no more blocks than this times its sequences
    int64_t tile = 0;          // of a ragged call: the blocks are of each `tile` tokens of q

    unsigned blocks(const Ragged& ragged) const {
        if (tile) return static_cast<unsigned>(grid[0] * ((ragged.numbers[Ragged::QUERIES] + tile - 1) / tile));
        if (!per_sequence) return grid[0];
        return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(grid[0], per_sequence * ragged.numbers[Ragged::SEQUENCES])));
    }

    void enqueue(const std::vector<int64_t>& addresses, const Ragged& ragged, void* stream) const {
        alignas(64) char maps[MOST_MAPS][128];
        int64_t values[MOST];
        void* places[MOST_MAPS + MOST];
        int count = 0;
        for (const Moved& tensor : moved) {
            tensor.encode(addresses[tensor.at.slot], ragged, maps[count]);
            places[count] = maps[count];
            ++count;
        }
        for (const Argument& argument : arguments) {
            int64_t* value = &values[count - moved.size()];
            *value = argument.value;
            if (argument.slot >= 0) *value += addresses[argument.slot];
            else if (argument.slot < -1) *value += ragged.numbers[-2 - argument.slot];
            places[count++] = value;
        }
        int status = driver.launch(function, blocks(ragged), grid[1], grid[2], threads, 1, 1, shared_bytes, stream, places, nullptr);
        TORCH_CHECK(status == 0, "the driver refuses a launch: error ", status);
    }
};

void* stream_of(const at::Device& device) {
    void* stream = nullptr;
    int index = device.has_index() ? device.index() : 0;
    TORCH_CHECK(driver.current_stream(index, &stream) == 0, "torch has no current stream on device ", index);
    return stream;
}

// Whether the current stream is captured. Python chooses other launches there: host time does not count in a graph.
bool captured(const at::Device& device) {
    int status = 0;
    return driver.captures && driver.captures(stream_of(device), &status) == 0 && status != 0;
}

}  // namespace

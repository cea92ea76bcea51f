// An allocator for torch's CPU tensors that lets glibc reuse the memory of freed tensors.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::size_t kAlignment = c10::gAlignment;

// The pointer to the block stands before the tensor's data. malloc aligns to 16 bytes, so there are
// at least 16 bytes between the block's start and the next multiple of kAlignment.
void*& block_of(void* data) { return static_cast<void**>(data)[-1]; }

void release(void* data) {
  if (data != nullptr) std::free(block_of(data));
}

class PlainMalloc final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t count) override {
    void* data = nullptr;
    if (count > 0) {
      void* block = count < SIZE_MAX - kAlignment ? std::malloc(count + kAlignment) : nullptr;
      TORCH_CHECK(block != nullptr, "cannot allocate memory for a tensor of ", count, " bytes");
      const auto address = reinterpret_cast<std::uintptr_t>(block);
      data = reinterpret_cast<void*>((address & ~(kAlignment - 1)) + kAlignment);
      block_of(data) = block;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

PlainMalloc plain_malloc;

}  // namespace

extern "C" void use_plain_malloc() { c10::SetCPUAllocator(&plain_malloc, /*priority=*/1); }

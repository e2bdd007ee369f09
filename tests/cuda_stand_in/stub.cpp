// A CUDA device that does not exist: what torch's C++ asks of one, in a build without CUDA.
//
// Autograd wants a device guard (streams and events, which do nothing here); pinned memory and random generators come
// from CUDA's hooks, and are plain memory and the CPU's generator here. Loaded before torch is imported: the hooks are
// looked up once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {
const Device THE_DEVICE(DeviceType::CUDA, 0);
const Stream THE_STREAM(Stream::DEFAULT, THE_DEVICE);

struct Guard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType D = DeviceType::CUDA;
  DeviceType type() const override { return D; }
  Device exchangeDevice(Device) const override { return THE_DEVICE; }
  Device getDevice() const override { return THE_DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return THE_STREAM; }
  Stream getDefaultStream(Device) const override { return THE_STREAM; }
  Stream getNewStream(Device, int) const override { return THE_STREAM; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return THE_STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return THE_STREAM; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Generator getNewGenerator(DeviceIndex = -1) const override { return make_generator<CPUGeneratorImpl>(); }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override {
    static Generator generator = make_generator<CPUGeneratorImpl>();
    return generator;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// Device guards that do nothing: torch for CPUs has none of these, and refuses tensors of devices without one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
C10_REGISTER_GUARD_IMPL(XPU, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU>)
C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>)
}

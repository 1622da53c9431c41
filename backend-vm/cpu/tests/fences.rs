//! Tests that the device says when it has written a fence.

use std::sync::mpsc::{TryRecvError, channel};

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::{AfterFence, Device, DriverCalls as _, RawStream};

#[test]
fn each_fence_has_its_call() {
    let options = Options {
        memory: Some(64 << 20),
        ..Options::default()
    };
    let device = CpuDevice::open(&options).expect("open");
    let address = device.mem_alloc(8).expect("allocate");
    let (sender, written) = channel();
    let call = AfterFence::new(move || sender.send(()).expect("the test lives"));
    assert!(device.call_after_fences(call), "its own threads write");
    for value in 1..=3 {
        device
            .write_fence(RawStream::LEGACY, address, value)
            .expect("a fence");
        assert_eq!(written.recv(), Ok(()));
    }
    device.synchronize().expect("no fault");
    assert_eq!(written.try_recv(), Err(TryRecvError::Empty));
}

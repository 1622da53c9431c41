//! Launches a kernel through the ring and waits on a fence that the device writes.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | address of the session segment |
//! | 1 | host | handle of the function, in wire format |
//! | 2 | host | handle of the stream, in wire format |
//! | 3 | host | number of the fence |
//! | 4 | host | current value of the fence |
//! | 5 | host | number of launches |
//! | 6 | host | the kernel's only parameter, 8 bytes |
//! | 7 | host | address of one word per launch for its duration in time stamps |
//! | 8 | payload | launches whose fence was written |
//! | 9 | payload | times that the consumer was parked, so that the host must ring the doorbell |
//! | 10 | host | 1: ring the doorbell for each record, and wait in the host |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_api::{Encode, Fence, FenceWrite, Handle, LaunchKernel, Message};
use wormhole_payload::{
    Parameters, entry, launch_of_one, ring, session, shared_word, timestamp, wait,
};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::ring::{Producer, RecordHead};
use wormhole_ring::status::Status;

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    // SAFETY: the host passed a session segment that it mapped for this payload.
    let (producer, fences, status) = unsafe {
        let session = session(parameters.load(0));
        (
            Producer::new(session.clone()),
            Fences::new(session.clone()),
            Status::new(session),
        )
    };
    let (Some(function), Some(stream)) = (
        Handle::from_wire(parameters.load(1)),
        Handle::from_wire(parameters.load(2)),
    ) else {
        return 1;
    };
    let Ok(number) = u32::try_from(parameters.load(3)) else {
        return 2;
    };
    let (Some(index), Some(fence)) = (FenceIndex::new(number), Fence::new(number)) else {
        return 2;
    };
    let argument = parameters.load(6).to_le_bytes();
    let launch = launch_of_one(function, stream, &argument);
    let base = parameters.load(4);
    let rings_always = parameters.load(10) == 1;
    let mut rings = 0;
    for round in 1..=parameters.load(5) {
        let start = timestamp();
        let value = base + round;
        let launched =
            launch.encode(|parts| producer.push(RecordHead::record(LaunchKernel::ID), parts));
        if rings_always {
            ring();
        }
        let fenced = FenceWrite {
            stream,
            fence,
            value,
        }
        .encode(|parts| producer.push(RecordHead::record(FenceWrite::ID), parts));
        if !matches!((launched, fenced), (Ok(Ok(())), Ok(Ok(())))) {
            return 3;
        }
        // Does not clear the parked word, so that the host's own request rings the doorbell.
        if rings_always {
            ring();
        } else if producer.consumer_parked() {
            rings += 1;
            parameters.store(9, rings);
        }
        while fences.load(index) < value {
            if status.load().is_some() {
                return 4;
            }
            match rings_always {
                true => wait(),
                false => core::hint::spin_loop(),
            }
        }
        // SAFETY: the host reserved one word per launch at this address.
        let sample = unsafe { shared_word(parameters.load(7) + 8 * (round - 1)) };
        sample.store(timestamp() - start, Ordering::Relaxed);
        parameters.store(8, round);
    }
    0
}

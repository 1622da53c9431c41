//! A process's memory counts on the device that holds it.

mod support;

use std::sync::Arc;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::{
    Decode, DevicePtr, Handle, MemAlloc, MemAllocReply, MemCreate, MemFree, MemGetInfo,
    MemGetInfoReply, MemRelease, Message, PartAlloc, PartFree, PeerAttribute, PoolAlloc,
    PoolAllocReply, PoolCreate, PoolFree, SlabAlloc, SlabAllocReply, SlabFree,
};
use wormhole_device::Device;

/// Two devices that do not report their own memory use, as GPUs do not.
struct Two {
    served: Served,
    recorders: [Arc<Recorder>; 2],
    sequence: u64,
}

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const INVALID_DEVICE: u32 = wormhole_api::CuResult::INVALID_DEVICE.0;

impl Two {
    fn start() -> Self {
        let starts = [0x6000_0000_0000, 0x6100_0000_0000];
        let recorders = starts.map(|start| Arc::new(Recorder::at(start)));
        let members = recorders
            .each_ref()
            .map(|member| Arc::clone(member) as Arc<dyn Device>);
        Self {
            served: Served::start_on(members.into(), 5),
            recorders,
            sequence: 0,
        }
    }

    /// Returns the answer to a request on a device.
    fn on<M: Message>(&mut self, device: u16, message: &M) -> Vec<u8> {
        let (result, payload) = self.ask(device, message);
        assert_eq!(result, 0);
        payload
    }

    /// Returns the result and the answer of a request on a device.
    fn ask<M: Message>(&mut self, device: u16, message: &M) -> (u32, Vec<u8>) {
        self.sequence += 1;
        self.served.on(device, self.sequence, message)
    }

    fn allocate(&mut self, device: u16, bytes: u64) -> MemFree {
        let payload = self.on(device, &MemAlloc { bytes });
        let address = MemAllocReply::decode(&payload).unwrap().address;
        MemFree { address }
    }

    fn held(&self) -> [u64; 3] {
        [0, 1, 2].map(|device| self.served.counters.device_memory(device))
    }
}

#[test]
fn beside_neighbours_what_is_free_is_all_but_the_process_s_own() {
    let mut two = Two::start();
    two.allocate(1, 0x20_0000);
    let mut free = |device| {
        let payload = two.on(device, &MemGetInfo {});
        let reply = MemGetInfoReply::decode(&payload).unwrap();
        assert_eq!(reply.total, 1 << 30);
        reply.free
    };
    // Free memory of the recorder, including other processes' use.
    assert_eq!([free(0), free(1)], [0, 0]);
    two.served.neighbours.set(true);
    let mut free = |device| {
        let payload = two.on(device, &MemGetInfo {});
        MemGetInfoReply::decode(&payload).unwrap().free
    };
    assert_eq!([free(0), free(1)], [1 << 30, (1 << 30) - 0x20_0000]);
    two.served.neighbours.set(false);
}

#[test]
fn numbers_of_attributes_between_devices_that_no_driver_has_reach_none() {
    let mut two = Two::start();
    for attribute in [0, 6, 255, u32::MAX] {
        let (result, _) = two.ask(0, &PeerAttribute { peer: 1, attribute });
        assert_eq!(result, INVALID_VALUE, "{attribute}");
    }
    assert_eq!(two.recorders[0].arrivals("peer_attribute"), 0);
    let known = PeerAttribute {
        peer: 1,
        attribute: 5,
    };
    // The recorder has no peers.
    assert_eq!(two.ask(0, &known).0, INVALID_DEVICE);
    assert_eq!(two.recorders[0].arrivals("peer_attribute"), 1);
}

#[test]
fn allocations_count_on_their_device() {
    let mut two = Two::start();
    let (first, second) = (two.allocate(0, 0x1000), two.allocate(1, 0x20_0000));
    assert_eq!(two.held(), [0x1000, 0x20_0000, 0]);
    // From either device.
    two.on(0, &second);
    assert_eq!(two.held(), [0x1000, 0, 0]);
    two.on(1, &first);
    assert_eq!(two.held(), [0; 3]);
}

#[test]
fn what_a_pool_gives_out_counts_on_the_pools_device() {
    let mut two = Two::start();
    let pool = handle(1);
    let make = PoolCreate {
        new: pool,
        handle_types: 0,
        most: 0,
    };
    two.on(1, &make);
    let stream = Handle::LEGACY;
    let bytes = 0x3000;
    let payload = two.on(
        0,
        &PoolAlloc {
            pool,
            stream,
            bytes,
        },
    );
    assert_eq!(two.held(), [0, bytes, 0]);
    let address = PoolAllocReply::decode(&payload).unwrap().address;
    two.served.record(&PoolFree { address, stream });
    // Memory freed by a record is counted with the next request at the latest.
    two.allocate(0, 0x1000);
    assert_eq!(two.held(), [0x1000, 0, 0]);
}

#[test]
fn a_slab_counts_as_a_whole_while_its_parts_come_and_go() {
    let mut two = Two::start();
    let bytes = 0x20_0000;
    let payload = two.on(1, &SlabAlloc { bytes });
    let slab = SlabAllocReply::decode(&payload).unwrap().address;
    assert_eq!(two.held(), [0, bytes, 0]);
    for offset in [0, 0x1000] {
        let address = DevicePtr(slab.0 + offset);
        let part = PartAlloc {
            address,
            bytes: 0x1000,
        };
        two.served.record(&part);
    }
    two.served.record(&PartFree { address: slab });
    // Records are counted with the next request at the latest.
    two.allocate(0, 0x1000);
    assert_eq!(two.held(), [0x1000, bytes, 0]);
    // From either device, with the other part.
    two.on(0, &SlabFree { address: slab });
    assert_eq!(two.held(), [0x1000, 0, 0]);
    assert_eq!(two.recorders[1].arrivals("mem_free"), 1);
    let (again, _) = two.ask(0, &SlabFree { address: slab });
    assert_eq!(again, INVALID_VALUE);
}

#[test]
fn mappable_memory_counts_on_its_device() {
    let mut two = Two::start();
    let bytes = 0x20_0000;
    for (device, number) in [(1, 1), (0, 2), (1, 3)] {
        let new = handle(number);
        let handle_types = 0;
        two.on(
            device,
            &MemCreate {
                new,
                bytes,
                handle_types,
            },
        );
    }
    assert_eq!(two.held(), [bytes, 2 * bytes, 0]);
    two.on(0, &MemRelease { memory: handle(1) });
    assert_eq!(two.held(), [bytes, bytes, 0]);
}

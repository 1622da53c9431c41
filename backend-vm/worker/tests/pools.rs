//! Validation of pool and virtual memory messages with arbitrary numbers.

mod support;

use std::sync::Arc;
use std::sync::mpsc::channel;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::{
    Access, AddressFree, AddressReserve, AddressReserveReply, Decode, DevicePtr, Element, Handle,
    MemAlloc, MemAllocReply, MemCreate, MemFree, MemMap, MemRelease, MemRename, MemSet,
    MemSetAccess, MemUnmap, Memory, Message, Pool, PoolAlloc, PoolAllocReply, PoolCreate,
    PoolDefault, PoolDestroy, PoolFree, PoolGetAttribute, ShareMemory, Synchronize,
};
use wormhole_backend_tests::backend::{PATIENCE, wait_until};
use wormhole_device::Device;
use wormhole_ring::control;
use wormhole_worker::Tuning;
use wormhole_worker::exchange::{Exchange, Reply};

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const INVALID_HANDLE: u32 = wormhole_api::CuResult::INVALID_HANDLE.0;
/// Granularity of the recorder, and the size of its reservations.
const UNIT: u64 = 1 << 20;

struct Ready {
    device: Arc<Recorder>,
    served: Served,
    sequence: u64,
}

fn ready() -> Ready {
    ready_to_share(Exchange::none())
}

fn ready_to_share(exchange: Exchange) -> Ready {
    let device = Arc::new(Recorder::new());
    let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
    let served = Served::start_sharing(devices, 3, Tuning::default(), exchange);
    Ready {
        device,
        served,
        sequence: 0,
    }
}

impl Ready {
    fn status<M: Message>(&mut self, message: &M) -> u32 {
        self.sequence += 1;
        self.served.ask(0, self.sequence, message);
        self.served.answer(0, self.sequence).0
    }

    fn payload<M: Message>(&mut self, message: &M) -> Vec<u8> {
        self.sequence += 1;
        self.served.call(0, self.sequence, message)
    }

    /// Returns the session's sticky result.
    fn result(&self) -> u32 {
        self.served.status.load().map_or(0, |cause| cause.result)
    }

    fn allocate(&mut self, pool: Handle<Pool>) -> DevicePtr {
        let message = PoolAlloc {
            pool,
            stream: Handle::LEGACY,
            bytes: 64,
        };
        PoolAllocReply::decode(&self.payload(&message))
            .unwrap()
            .address
    }

    fn reserve(&mut self) -> u64 {
        let message = AddressReserve {
            bytes: 4 * UNIT,
            alignment: 0,
            hint: 0,
        };
        let payload = self.payload(&message);
        AddressReserveReply::decode(&payload).unwrap().address.0
    }

    fn create(&mut self, index: u32, bytes: u64) -> Handle<Memory> {
        let new = handle(index);
        let message = MemCreate {
            new,
            bytes,
            handle_types: 0,
        };
        assert_eq!(self.status(&message), 0);
        new
    }

    fn map(&mut self, address: u64, memory: Handle<Memory>) -> u32 {
        let address = DevicePtr(address);
        self.status(&MemMap { address, memory })
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> u32 {
        let address = DevicePtr(address);
        self.status(&MemUnmap { address, bytes })
    }

    /// Records a fill, which no answer carries, and returns the session's result afterwards.
    fn fill(&mut self, address: u64, bytes: u64) -> u32 {
        self.served.record(&MemSet {
            destination: DevicePtr(address),
            pitch: 0,
            width: bytes,
            height: 1,
            value: 0,
            element: Element::Byte,
            stream: Handle::LEGACY,
        });
        // Answered after the fill.
        self.status(&PoolGetAttribute {
            pool: handle(99),
            attribute: 1,
        });
        self.result()
    }
}

#[test]
fn only_memory_of_pools_is_freed_in_stream_order_and_once() {
    let free = |address| PoolFree {
        address,
        stream: Handle::LEGACY,
    };
    for honest in [true, false] {
        let mut ready = ready();
        let pool = handle(1);
        assert_eq!(ready.status(&PoolDefault { new: pool }), 0);
        let address = ready.allocate(pool);
        let payload = ready.payload(&MemAlloc { bytes: 64 });
        let other = MemAllocReply::decode(&payload).unwrap().address;
        let wrong = if honest { address } else { other };
        ready.served.record(&free(wrong));
        assert_eq!(
            ready.status(&MemFree { address: wrong }),
            if honest { INVALID_VALUE } else { 0 }
        );
        assert_eq!(ready.result(), if honest { 0 } else { INVALID_VALUE });
        assert!(!ready.device.is_alive(wrong.0));
    }
}

#[test]
fn memory_of_a_pool_may_be_named_until_it_is_freed() {
    let mut ready = ready();
    let pool = handle(1);
    assert_eq!(ready.status(&PoolDefault { new: pool }), 0);
    let address = ready.allocate(pool);
    assert_eq!(ready.fill(address.0, 64), 0);
    assert_eq!(ready.status(&MemFree { address }), 0);
    assert_eq!(ready.status(&MemFree { address }), INVALID_VALUE);
    assert_eq!(ready.fill(address.0, 64), INVALID_VALUE);
}

#[test]
fn a_pool_goes_when_the_last_job_that_uses_it_is_done() {
    let mut ready = ready();
    let pool = handle(1);
    let create = PoolCreate {
        new: pool,
        handle_types: 0,
        most: 0,
    };
    assert_eq!(ready.status(&create), 0);
    assert_eq!(ready.status(&create), INVALID_HANDLE, "minted twice");
    wait_until(
        || ready.device.arrivals("pool_destroy") == 1,
        || "the end of the second pool".to_owned(),
    );
    ready.device.hold("pool_alloc");
    let message = PoolAlloc {
        pool,
        stream: Handle::LEGACY,
        bytes: 64,
    };
    ready.served.ask(1, 100, &message);
    ready.device.wait_for("pool_alloc", 1);
    assert_eq!(ready.status(&PoolDestroy { pool }), 0);
    assert_eq!(ready.status(&PoolDestroy { pool }), INVALID_HANDLE);
    assert_eq!(ready.device.arrivals("pool_destroy"), 1);
    ready.device.let_go("pool_alloc");
    assert_eq!(ready.served.answer(1, 100).0, 0);
    wait_until(
        || ready.device.arrivals("pool_destroy") == 2,
        || "the end of the pool".to_owned(),
    );
    let attribute = PoolGetAttribute { pool, attribute: 4 };
    assert_eq!(ready.status(&attribute), INVALID_HANDLE);
}

#[test]
fn the_default_pool_stays() {
    let mut ready = ready();
    let pool = handle(1);
    assert_eq!(ready.status(&PoolDefault { new: pool }), 0);
    assert_eq!(ready.status(&PoolDestroy { pool }), INVALID_VALUE);
    ready.allocate(pool);
    assert_eq!(ready.device.arrivals("pool_destroy"), 0);
}

#[test]
fn memory_is_mapped_only_where_addresses_are_reserved_and_free() {
    let mut ready = ready();
    let base = ready.reserve();
    let two = ready.create(1, 2 * UNIT);
    for wrong in [base - UNIT, base + 3 * UNIT, 0, u64::MAX - UNIT, u64::MAX] {
        assert_eq!(ready.map(wrong, two), INVALID_VALUE, "{wrong:#x}");
    }
    assert_eq!(ready.map(base, handle(7)), INVALID_HANDLE);
    assert_eq!(ready.device.arrivals("map"), 0);
    assert_eq!(ready.map(base, two), 0);
    for taken in [base, base + UNIT] {
        assert_eq!(ready.map(taken, two), INVALID_VALUE);
    }
    assert_eq!(ready.map(base + 2 * UNIT, two), 0);
    assert_eq!(ready.device.arrivals("map"), 2);
}

#[test]
fn reservations_and_mappings_are_made_where_records_are_executed() {
    let mut ready = ready();
    let base = ready.reserve();
    let memory = ready.create(1, UNIT);
    assert_eq!(ready.map(base, memory), 0);
    // Records are executed on that thread.
    assert_eq!(ready.fill(base, UNIT), 0);
    let whole = AddressFree {
        address: DevicePtr(ready.reserve()),
        bytes: 4 * UNIT,
    };
    assert_eq!(ready.status(&whole), 0);
    let executor = ready.device.threads("fill")[0];
    for call in ["address_reserve", "map", "address_free"] {
        let threads = ready.device.threads(call);
        assert!(!threads.is_empty(), "{call}");
        assert!(threads.iter().all(|thread| *thread == executor), "{call}");
    }
}

#[test]
fn records_find_the_mappings_of_records_before_them() {
    let mut ready = ready();
    let base = ready.reserve();
    let memory = ready.create(1, UNIT);
    for address in [base, base + 2 * UNIT].map(DevicePtr) {
        ready.served.record(&MemMap { address, memory });
    }
    assert_eq!(ready.fill(base, UNIT), 0);
    for address in [base, base + 2 * UNIT] {
        assert_eq!(ready.unmap(address, UNIT), 0);
    }
    let free = AddressFree {
        address: DevicePtr(base),
        bytes: 4 * UNIT,
    };
    ready.served.record(&free);
    assert_eq!(ready.status(&free), INVALID_VALUE);
    assert_eq!(ready.served.status.load(), None);
    // A guest that names what it does not have ends its own session.
    ready.served.record(&free);
    assert_eq!(ready.status(&free), INVALID_VALUE);
    let cause = ready.served.status.load();
    assert_eq!(cause.map(|cause| cause.result), Some(INVALID_VALUE));
}

#[test]
fn memory_that_a_stream_freed_is_allocated_where_records_are_executed() {
    let mut ready = ready();
    let pool = handle(1);
    assert_eq!(ready.status(&PoolDefault { new: pool }), 0);
    let stream = Handle::LEGACY;
    let first = ready.allocate(pool);
    ready.fill(first.0, 64);
    for address in [first, ready.allocate(pool)] {
        ready.served.record(&PoolFree { address, stream });
    }
    let again = [(); 3].map(|()| ready.allocate(pool));
    for address in again {
        assert_eq!(ready.fill(address.0, 64), 0);
        ready.served.record(&PoolFree { address, stream });
    }
    // A synchronization may have released what was free.
    ready.payload(&Synchronize { stream: None });
    ready.allocate(pool);
    let executor = ready.device.threads("fill")[0];
    let threads = ready.device.threads("pool_alloc");
    let here: Vec<bool> = threads.iter().map(|thread| *thread == executor).collect();
    assert_eq!(here, [false, false, true, true, false, false]);
}

#[test]
fn mappings_end_whole_and_keep_what_they_show() {
    let mut ready = ready();
    let base = ready.reserve();
    let [first, second] = [1, 2].map(|index| ready.create(index, UNIT));
    assert_eq!(ready.map(base, first), 0);
    assert_eq!(ready.map(base + UNIT, second), 0);
    assert_eq!(ready.status(&MemRelease { memory: first }), INVALID_VALUE);
    let whole = AddressFree {
        address: DevicePtr(base),
        bytes: 4 * UNIT,
    };
    assert_eq!(ready.status(&whole), INVALID_VALUE);
    for (address, bytes) in [
        (base, UNIT / 2),
        (base + 4096, UNIT),
        (base, 3 * UNIT),
        (base, 0),
        (base, u64::MAX),
        (base + 2 * UNIT, UNIT),
    ] {
        assert_eq!(ready.unmap(address, bytes), INVALID_VALUE, "{bytes:#x}");
        let access = MemSetAccess {
            address: DevicePtr(address),
            bytes,
            access: Access::Read,
        };
        assert_eq!(ready.status(&access), INVALID_VALUE, "{bytes:#x}");
    }
    assert_eq!(ready.device.arrivals("mem_unmap"), 0);
    assert_eq!(ready.device.arrivals("set_access"), 0);
    assert_eq!(ready.unmap(base, 2 * UNIT), 0);
    assert_eq!(ready.status(&MemRelease { memory: first }), 0);
    assert_eq!(ready.status(&MemRelease { memory: first }), INVALID_HANDLE);
    let part = AddressFree {
        bytes: UNIT,
        ..whole
    };
    assert_eq!(ready.status(&part), INVALID_VALUE);
    assert_eq!(ready.status(&whole), 0);
    assert_eq!(ready.status(&whole), INVALID_VALUE);
    assert_eq!(ready.device.arrivals("mem_release"), 1);
}

#[test]
fn memory_gets_another_handle_unless_it_is_mapped() {
    let mut ready = ready();
    let base = ready.reserve();
    let memory = ready.create(1, UNIT);
    let [new, other] = [2, 3].map(handle);
    assert_eq!(ready.status(&MemRename { memory, new }), 0);
    assert_eq!(ready.map(base, memory), INVALID_HANDLE);
    assert_eq!(ready.map(base, new), 0);
    let renamed = MemRename {
        memory: new,
        new: other,
    };
    assert_eq!(ready.status(&renamed), INVALID_VALUE);
    assert_eq!(ready.unmap(base, UNIT), 0);
    // A handle in use names its own memory.
    ready.create(3, UNIT);
    assert_ne!(ready.status(&renamed), 0);
    let arrivals = ["create_memory", "mem_unmap"].map(|call| ready.device.arrivals(call));
    assert_eq!(arrivals, [2, 1]);
}

#[test]
fn memory_keeps_its_handle_while_it_is_being_shared() {
    let (sender, asked) = channel();
    let exchange = Exchange::new(move |message, _| {
        let id = match message {
            control::Message::Share(share) => share.id,
            control::Message::Unshare(unshare) => unshare.id,
            message => panic!("{message:?}"),
        };
        sender.send(id).is_ok()
    });
    let mut ready = ready_to_share(exchange.clone());
    let answer_next = || {
        let id = asked.recv_timeout(PATIENCE).unwrap();
        exchange.answer(id, 0, Reply::Token([7; 2]));
    };
    let memory = ready.create(1, UNIT);
    ready.served.ask(1, 100, &ShareMemory { memory });
    // The supervisor has the descriptor, and its token is still on the way.
    let id = asked.recv_timeout(PATIENCE).unwrap();
    let rename = MemRename {
        memory,
        new: handle(2),
    };
    assert_eq!(ready.status(&rename), INVALID_VALUE);
    assert_eq!(ready.status(&MemRelease { memory }), INVALID_VALUE);
    exchange.answer(id, 0, Reply::Token([7; 2]));
    assert_eq!(ready.served.answer(1, 100).0, 0);
    assert_eq!(ready.status(&rename), INVALID_VALUE);
    ready.served.ask(1, 101, &MemRelease { memory });
    answer_next();
    assert_eq!(ready.served.answer(1, 101).0, 0);
    assert_eq!(ready.device.arrivals("mem_release"), 1);
}

#[test]
fn a_mapping_is_nobody_elses_while_a_job_is_at_work_on_it() {
    let mut ready = ready();
    let base = ready.reserve();
    let memory = ready.create(1, UNIT);
    assert_eq!(ready.map(base, memory), 0);
    // Beside another job the executor does not unmap itself.
    ready.device.hold("mem_alloc");
    ready.served.ask(2, 100, &MemAlloc { bytes: 65 << 20 });
    ready.device.wait_for("mem_alloc", 1);
    ready.device.hold("mem_unmap");
    let unmap = MemUnmap {
        address: DevicePtr(base),
        bytes: UNIT,
    };
    ready.served.ask(1, 100, &unmap);
    ready.device.wait_for("mem_unmap", 1);
    assert_eq!(ready.status(&unmap), INVALID_VALUE);
    assert_eq!(ready.status(&MemRelease { memory }), INVALID_VALUE);
    assert_eq!(ready.map(base, memory), INVALID_VALUE);
    assert_eq!(ready.fill(base, 16), INVALID_VALUE);
    ready.device.let_go("mem_unmap");
    assert_eq!(ready.served.answer(1, 100).0, 0);
    assert_eq!(ready.status(&MemRelease { memory }), 0);
    ready.device.let_go("mem_alloc");
    assert_eq!(ready.served.answer(2, 100).0, 0);
}

#[test]
fn copies_reach_over_mappings_and_not_over_gaps() {
    for (bytes, result) in [(2 * UNIT, 0), (2 * UNIT + 1, INVALID_VALUE)] {
        let mut ready = ready();
        let base = ready.reserve();
        for index in [0, 1, 3] {
            let memory = ready.create(index, UNIT);
            assert_eq!(ready.map(base + u64::from(index) * UNIT, memory), 0);
        }
        assert_eq!(ready.fill(base, bytes), result);
    }
}

//! Sharing between processes of one tenant, and refusal to other tenants.

use std::fs;

use wormhole_api::{
    CloseAllocation, Decode, DevicePtr, Event, EventDestroy, Handle, MemAlloc, MemAllocReply,
    MemCopy, MemCreate, MemFree, MemRelease, MemRename, Memory, Message as ApiMessage,
    OpenAllocation, OpenAllocationReply, OpenEvent, OpenMemory, OpenMemoryReply, OpenPointer,
    OpenPointerReply, OpenPool, PartAlloc, PartFree, Pool, PoolAlloc, PoolAllocReply, PoolCreate,
    PoolDestroy, ShareAddress, ShareAddressReply, ShareEvent, ShareEventReply, ShareMemory,
    ShareMemoryReply, SharePool, SharePoolReply, SharedAddress, SharedEventCreate, SlabAlloc,
    SlabAllocReply,
};
use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, kill, limit_descriptors, wait_until,
};
use wormhole_backend_tests::guest::Guest;
use wormhole_ring::control::Attach;

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const INVALID_CONTEXT: u32 = wormhole_api::CuResult::INVALID_CONTEXT.0;
const INVALID_HANDLE: u32 = wormhole_api::CuResult::INVALID_HANDLE.0;
const BYTES: u64 = 64 << 10;
/// Offset of the last word of as many bytes.
const WORDS_END: usize = (64 << 10) - 4;
const UNIT: u64 = 2 << 20;

type Token = [u8; 16];

#[test]
fn a_supervisor_without_room_for_a_descriptor_refuses_it_and_ends_nobody() {
    const OUT_OF_MEMORY: u32 = wormhole_api::CuResult::OUT_OF_MEMORY.0;
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let event = guest.mint();
    succeeds(&mut guest, &SharedEventCreate { new: event });
    wait_until(
        || backend.log().matches("is ready on").count() == 2,
        || "the spare worker, which takes descriptors".into(),
    );
    let supervisor = backend.child.id();
    let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .maximum
        .unwrap_or(1 << 20);
    limit_descriptors(supervisor, 3, soft).unwrap();
    let share = ShareEvent { event };
    assert_eq!(guest.call(&share).status, OUT_OF_MEMORY);
    assert_eq!(guest.call(&share).status, OUT_OF_MEMORY);
    limit_descriptors(supervisor, soft, soft).unwrap();
    let payload = succeeds(&mut guest, &share);
    assert_ne!(ShareEventReply::decode(&payload).unwrap().token, [0; 16]);
    let log = backend.log();
    assert!(!log.contains("broke the protocol"), "{log}");
}

/// One shared object of each kind.
struct Shared {
    address: DevicePtr,
    event: Handle<Event>,
    memory: Handle<Memory>,
    pool: Handle<Pool>,
    allocation_token: Token,
    event_token: Token,
    memory_token: Token,
    pool_token: Token,
    pointer_token: Token,
}

fn succeeds<M: ApiMessage>(guest: &mut Guest, message: &M) -> Vec<u8> {
    let answer = guest.call(message);
    assert_eq!(answer.status, 0, "{}", M::NAME);
    answer.payload
}

fn share_address(guest: &mut Guest, address: DevicePtr, what: SharedAddress) -> Token {
    let payload = succeeds(guest, &ShareAddress { address, what });
    ShareAddressReply::decode(&payload).unwrap().token
}

fn share(guest: &mut Guest) -> Shared {
    let payload = succeeds(guest, &MemAlloc { bytes: BYTES });
    let address = MemAllocReply::decode(&payload).unwrap().address;
    let (event, memory, pool) = (guest.mint(), guest.mint(), guest.mint());
    succeeds(guest, &SharedEventCreate { new: event });
    succeeds(
        guest,
        &MemCreate {
            new: memory,
            bytes: UNIT,
            handle_types: 1,
        },
    );
    succeeds(
        guest,
        &PoolCreate {
            new: pool,
            handle_types: 1,
            most: 0,
        },
    );
    let payload = succeeds(
        guest,
        &PoolAlloc {
            pool,
            stream: Handle::LEGACY,
            bytes: BYTES,
        },
    );
    let pointer = PoolAllocReply::decode(&payload).unwrap().address;
    let event_token = succeeds(guest, &ShareEvent { event });
    let memory_token = succeeds(guest, &ShareMemory { memory });
    let pool_token = succeeds(guest, &SharePool { pool });
    Shared {
        address,
        event,
        memory,
        pool,
        allocation_token: share_address(guest, address, SharedAddress::Allocation),
        event_token: ShareEventReply::decode(&event_token).unwrap().token,
        memory_token: ShareMemoryReply::decode(&memory_token).unwrap().token,
        pool_token: SharePoolReply::decode(&pool_token).unwrap().token,
        pointer_token: share_address(guest, pointer, SharedAddress::Pointer),
    }
}

/// Returns the results of opening an object of each kind.
fn statuses(guest: &mut Guest, shared: &Shared) -> [u32; 5] {
    let allocation = guest.call(&OpenAllocation {
        token: shared.allocation_token,
    });
    let new = guest.mint();
    let event = guest.call(&OpenEvent {
        new,
        token: shared.event_token,
    });
    let new = guest.mint();
    let memory = guest.call(&OpenMemory {
        new,
        token: shared.memory_token,
    });
    let pool: Handle<Pool> = guest.mint();
    let opened = guest.call(&OpenPool {
        new: pool,
        token: shared.pool_token,
    });
    let pointer = guest.call(&OpenPointer {
        pool,
        token: shared.pointer_token,
    });
    [allocation, event, memory, opened, pointer].map(|answer| answer.status)
}

fn fill(guest: &mut Guest, destination: DevicePtr, value: u32) {
    guest.fill(destination, BYTES / 4, value);
    guest.finish();
}

/// Returns the first and the last word of device memory.
fn words(guest: &mut Guest, source: DevicePtr) -> [u32; 2] {
    guest.record(&MemCopy {
        destination: DevicePtr(guest.arena[0].address),
        source,
        bytes: BYTES,
        stream: Handle::LEGACY,
    });
    guest.finish();
    [0, WORDS_END].map(|at| {
        let bytes = guest.arena[0].read(at, 4);
        u32::from_le_bytes(bytes.try_into().unwrap())
    })
}

fn open_allocation(guest: &mut Guest, token: Token) -> DevicePtr {
    let payload = succeeds(guest, &OpenAllocation { token });
    let reply = OpenAllocationReply::decode(&payload).unwrap();
    assert_eq!(reply.bytes, BYTES);
    reply.address
}

#[test]
fn a_token_is_worth_nothing_to_another_tenant_nor_forged_nor_of_another_kind() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start(Workers::built(), &listen);
    backend.attach(64, Attach::default()).unwrap();
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    let (mut exporter, mut importer) = (backend.connect().open(), backend.connect().open());
    let mut stranger = neighbour.connect().open();

    let shared = share(&mut exporter);
    assert_eq!(
        statuses(&mut stranger, &shared),
        [1, 1, 1, 1, INVALID_HANDLE],
        "another tenant"
    );
    assert_eq!(statuses(&mut importer, &shared), [0; 5]);
    let own = [INVALID_CONTEXT, INVALID_CONTEXT, 0, 0, 0];
    assert_eq!(statuses(&mut exporter, &shared), own, "its own");
    // Objects that the stranger shares do not give it access either.
    let theirs = share(&mut stranger);
    assert_eq!(
        statuses(&mut importer, &theirs),
        [1, 1, 1, 1, INVALID_HANDLE]
    );

    let mut forged = shared.allocation_token;
    forged[15] ^= 1;
    for token in [forged, shared.event_token, shared.memory_token, [0; 16]] {
        let status = importer.call(&OpenAllocation { token }).status;
        assert_eq!(status, INVALID_VALUE);
    }
    for token in [shared.allocation_token, shared.pool_token] {
        let new = importer.mint();
        let status = importer.call(&OpenEvent { new, token }).status;
        assert_eq!(status, INVALID_VALUE);
        let new = importer.mint();
        let status = importer.call(&OpenMemory { new, token }).status;
        assert_eq!(status, INVALID_VALUE);
    }
    // Tokens do not follow from each other.
    let again = share(&mut exporter);
    assert_ne!(again.allocation_token, shared.allocation_token);
    let same = share_address(&mut exporter, shared.address, SharedAddress::Allocation);
    assert_eq!(same, shared.allocation_token, "asked again");
}

#[test]
fn what_one_process_writes_another_reads_until_it_is_closed() {
    let mut backend = Backend::with_window(64);
    let (mut exporter, mut importer) = (backend.connect().open(), backend.connect().open());
    let shared = share(&mut exporter);
    let opened = open_allocation(&mut importer, shared.allocation_token);
    fill(&mut exporter, shared.address, 0x1234_5678);
    assert_eq!(words(&mut importer, opened), [0x1234_5678; 2]);
    fill(&mut importer, opened, 0x0BAD_CAFE);
    assert_eq!(words(&mut exporter, shared.address), [0x0BAD_CAFE; 2]);

    let freed = importer.call(&MemFree { address: opened });
    assert_eq!(freed.status, INVALID_VALUE, "it is not its own to free");
    let again = importer.call(&ShareAddress {
        address: opened,
        what: SharedAddress::Allocation,
    });
    assert_eq!(again.status, INVALID_VALUE, "nor to share");
    for status in [0, INVALID_VALUE] {
        let closed = importer.call(&CloseAllocation { address: opened });
        assert_eq!(closed.status, status);
    }
    let own = exporter.call(&CloseAllocation {
        address: shared.address,
    });
    assert_eq!(own.status, INVALID_VALUE, "it was never opened");
    assert_eq!(
        words(&mut exporter, shared.address),
        [0x0BAD_CAFE; 2],
        "closing empties nothing"
    );
}

#[test]
fn parts_are_shared_by_the_token_of_their_slab_until_the_last_one_is_freed() {
    const SLAB: u64 = 2 << 20;
    let mut backend = Backend::with_window(64);
    let (mut exporter, mut importer) = (backend.connect().open(), backend.connect().open());
    let payload = succeeds(&mut exporter, &SlabAlloc { bytes: SLAB });
    let slab = SlabAllocReply::decode(&payload).unwrap().address;
    let parts = [0, BYTES].map(|offset| DevicePtr(slab.0 + offset));
    let unnamed = ShareAddress {
        address: slab,
        what: SharedAddress::Allocation,
    };
    assert_eq!(exporter.call(&unnamed).status, INVALID_VALUE, "no part");
    for address in parts {
        exporter.record(&PartAlloc {
            address,
            bytes: BYTES,
        });
    }
    let tokens = parts.map(|part| share_address(&mut exporter, part, SharedAddress::Allocation));
    assert_eq!(tokens[0], tokens[1]);
    let [token, _] = tokens;
    let payload = succeeds(&mut importer, &OpenAllocation { token });
    let opened = OpenAllocationReply::decode(&payload).unwrap();
    assert_eq!(opened.bytes, SLAB);
    fill(&mut exporter, parts[1], 0x0BAD_CAFE);
    let second = DevicePtr(opened.address.0 + BYTES);
    assert_eq!(words(&mut importer, second), [0x0BAD_CAFE; 2]);
    let address = opened.address;
    succeeds(&mut importer, &CloseAllocation { address });
    // One part is shared still.
    exporter.record(&PartFree { address: parts[0] });
    succeeds(&mut importer, &OpenAllocation { token });
    exporter.record(&PartFree { address: parts[1] });
    let mut late = backend.connect().open();
    wait_until(
        || late.call(&OpenAllocation { token }).status == INVALID_VALUE,
        || "nobody finds what is gone".into(),
    );
}

#[test]
fn what_is_freed_is_shared_no_longer() {
    let mut backend = Backend::with_window(64);
    let (mut exporter, mut importer) = (backend.connect().open(), backend.connect().open());
    let shared = share(&mut exporter);
    succeeds(
        &mut exporter,
        &MemFree {
            address: shared.address,
        },
    );
    exporter.record(&EventDestroy {
        event: shared.event,
    });
    succeeds(
        &mut exporter,
        &MemRelease {
            memory: shared.memory,
        },
    );
    succeeds(&mut exporter, &PoolDestroy { pool: shared.pool });
    // The exporter's worker withdraws them asynchronously.
    let gone = [1, 1, 1, 1, INVALID_HANDLE];
    wait_until(
        || statuses(&mut importer, &shared) == gone,
        || "nobody finds what is gone".into(),
    );
}

#[test]
fn a_process_that_dies_takes_its_tokens_with_it_and_no_other_process() {
    for killed in [false, true] {
        let mut backend = Backend::with_window(64);
        // The first session gets the worker that was started first.
        let first = backend.workers();
        let mut exporter = backend.connect().open();
        let mut importer = backend.connect().open();
        let shared = share(&mut exporter);
        let opened = open_allocation(&mut importer, shared.allocation_token);
        let memory = importer.mint();
        let payload = succeeds(
            &mut importer,
            &OpenMemory {
                new: memory,
                token: shared.memory_token,
            },
        );
        assert_eq!(OpenMemoryReply::decode(&payload).unwrap().bytes, UNIT);
        fill(&mut exporter, shared.address, 0x77);
        if killed {
            assert_eq!(first.len(), 1);
            kill(first[0], libc::SIGKILL);
            exporter.wait_for_status();
        }
        drop(exporter);
        backend.report();
        assert_eq!(
            statuses(&mut importer, &shared),
            [1, 1, 1, 1, INVALID_HANDLE]
        );
        assert_eq!(words(&mut importer, opened), [0x77; 2], "it has it still");
        succeeds(&mut importer, &CloseAllocation { address: opened });
        succeeds(&mut importer, &MemRelease { memory });
    }
}

#[test]
fn nothing_stays_behind_of_processes_that_shared() {
    let mut backend = Backend::with_window(64);
    let mut importer = backend.connect().open();
    let descriptors = |backend: &Backend| {
        let path = format!("/proc/{}/fd", backend.child.id());
        fs::read_dir(path).unwrap().count()
    };
    // The importer's, and the spare one.
    let mut workers = 2;
    let mut round = |backend: &mut Backend| {
        let mut exporter = backend.connect().open();
        let shared = share(&mut exporter);
        assert_eq!(statuses(&mut importer, &shared), [0; 5]);
        drop(exporter);
        backend.report();
        // The exporter took the spare worker, and the supervisor opens the next one's descriptors
        // asynchronously.
        workers += 1;
        wait_until(
            || backend.log().matches("is ready on").count() >= workers,
            || "the next spare worker".into(),
        );
    };
    round(&mut backend);
    let before = descriptors(&backend);
    for _ in 0..8 {
        round(&mut backend);
    }
    // A thread closes the files asynchronously, and two sessions that begin together leave one more spare, of two descriptors.
    wait_until(
        || descriptors(&backend) <= before + 4,
        || format!("{} descriptors, {before} before", descriptors(&backend)),
    );
}

#[test]
fn memory_that_is_released_is_held_by_nobody() {
    let mut backend = Backend::with_window(64);
    let mut exporter = backend.connect().open();
    // Counts device memory that the supervisor holds; other files come and go with spare workers.
    let held = |backend: &Backend| {
        let path = format!("/proc/{}/fd", backend.child.id());
        let links = fs::read_dir(path).unwrap().flatten();
        let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
        links
            .filter(|link| link.to_string_lossy().contains("memfd:wormhole-device"))
            .count()
    };
    assert_eq!(held(&backend), 0);
    for _ in 0..20 {
        let new = exporter.mint();
        let create = MemCreate {
            new,
            bytes: UNIT,
            handle_types: 1,
        };
        succeeds(&mut exporter, &create);
        succeeds(&mut exporter, &ShareMemory { memory: new });
        assert_eq!(held(&backend), 1);
        succeeds(&mut exporter, &MemRelease { memory: new });
        assert_eq!(held(&backend), 0, "when the call has returned");
    }
    // A handle that memory must not get changes nothing.
    let (memory, other) = (exporter.mint(), exporter.mint());
    let create = MemCreate {
        new: memory,
        bytes: UNIT,
        handle_types: 1,
    };
    succeeds(&mut exporter, &create);
    succeeds(&mut exporter, &ShareMemory { memory });
    for _ in 0..2 {
        let rename = MemRename { memory, new: other };
        assert_eq!(exporter.call(&rename).status, INVALID_VALUE);
    }
    succeeds(&mut exporter, &MemRelease { memory });
    assert_eq!(held(&backend), 0, "although another handle was refused");
}

#[test]
fn a_pointer_of_a_pool_is_opened_in_that_pool_alone() {
    let mut backend = Backend::with_window(64);
    let (mut exporter, mut importer) = (backend.connect().open(), backend.connect().open());
    let shared = share(&mut exporter);
    let (token, pool) = (shared.pointer_token, importer.mint());
    let own = importer.mint();
    succeeds(
        &mut importer,
        &PoolCreate {
            new: own,
            handle_types: 1,
            most: 0,
        },
    );
    succeeds(
        &mut importer,
        &OpenPool {
            new: pool,
            token: shared.pool_token,
        },
    );
    let refused = importer.call(&OpenPointer { pool: own, token });
    assert_eq!(refused.status, INVALID_VALUE);
    let refused = importer.call(&PoolAlloc {
        pool,
        stream: Handle::LEGACY,
        bytes: 64,
    });
    assert_eq!(refused.status, INVALID_VALUE);
    let payload = succeeds(&mut importer, &OpenPointer { pool, token });
    let opened = OpenPointerReply::decode(&payload).unwrap();
    assert_eq!(opened.bytes, BYTES);
    fill(&mut importer, opened.address, 0x99);
    let address = opened.address;
    for status in [0, INVALID_VALUE] {
        assert_eq!(importer.call(&MemFree { address }).status, status);
    }
    let private = share_address_of_private_pool(&mut importer);
    assert_eq!(private, INVALID_VALUE);
}

/// Returns the result of sharing an allocation from a pool that was created without handle types.
fn share_address_of_private_pool(guest: &mut Guest) -> u32 {
    let new = guest.mint();
    succeeds(
        guest,
        &PoolCreate {
            new,
            handle_types: 0,
            most: 0,
        },
    );
    let payload = succeeds(
        guest,
        &PoolAlloc {
            pool: new,
            stream: Handle::LEGACY,
            bytes: 64,
        },
    );
    let address = PoolAllocReply::decode(&payload).unwrap().address;
    let what = SharedAddress::Pointer;
    let refused = guest.call(&ShareAddress { address, what });
    assert_eq!(guest.call(&SharePool { pool: new }).status, INVALID_VALUE);
    refused.status
}

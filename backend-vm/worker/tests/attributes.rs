//! Launch attributes that a guest sets on launches, kernel nodes, streams and cluster occupancy
//! queries.

mod support;

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use support::recorder::Recorder;
use support::served::{Served, handle, launch_with};
use wormhole_api::{
    ClusterOccupancy, ClusterQuestion, Decode, DevicePtr, GraphBegin, GraphInstantiate,
    GraphKernel, Items, LaunchAttribute, MemAlloc, MemAllocReply, Message, ModuleGetFunction,
    StreamCreate, StreamSetAttribute,
};
use wormhole_backend_tests::messages::module_load;
use wormhole_device::Device;
use wormhole_worker::session::Event;

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const NOT_SUPPORTED: u32 = wormhole_api::CuResult::NOT_SUPPORTED.0;
/// Bytes of the session's memory.
const BYTES: u64 = 4096;

/// Sets an attribute and returns the result.
type Set = fn(&mut Ready, LaunchAttribute) -> u32;

const SCOPES: [(&str, Set); 5] = [
    ("launch", Ready::launch),
    ("later launch", Ready::launch_again),
    ("node", Ready::node),
    ("question", Ready::question),
    ("stream", Ready::stream),
];

/// A session with an allocation, a stream and a function.
struct Ready {
    served: Served,
    sequence: u64,
    memory: u64,
    graphs: u32,
}

fn ready() -> Ready {
    let device = Arc::new(Recorder::new()) as Arc<dyn Device>;
    let served = Served::start(&device, 3);
    let payload = served.call(0, 1, &MemAlloc { bytes: BYTES });
    let memory = MemAllocReply::decode(&payload).unwrap().address.0;
    let image = Box::leak(Box::new([const { AtomicU8::new(0) }; 64]));
    let address = image.as_ptr().expose_provenance() as u64;
    let added = Event::ExtentAdded { address, bytes: 64 };
    served.notifier.send(added);
    let mut ready = Ready {
        served,
        sequence: 1,
        memory,
        graphs: 0,
    };
    let load = module_load(handle(1), DevicePtr(address), 64);
    assert_eq!(ready.status(&load), 0);
    let look_up = ModuleGetFunction {
        module: handle(1),
        new: handle(1),
        name: b"first",
    };
    assert_eq!(ready.status(&look_up), 0);
    ready.served.record(&StreamCreate {
        new: handle(1),
        flags: 0,
        priority: 0,
    });
    ready
}

impl Ready {
    fn status<M: Message>(&mut self, message: &M) -> u32 {
        self.sequence += 1;
        self.served.ask(0, self.sequence, message);
        self.served.answer(0, self.sequence).0
    }

    fn launch(&mut self, attribute: LaunchAttribute) -> u32 {
        self.status(&launch_with(&[attribute]))
    }

    /// Returns the result of a record, which no answer carries.
    fn launch_again(&mut self, attribute: LaunchAttribute) -> u32 {
        let fresh = ready();
        fresh.served.record(&launch_with(&[attribute]));
        // Executed in order, so after the launch.
        fresh.served.call(0, 100, &MemAlloc { bytes: 1 });
        fresh.served.status.load().map_or(0, |cause| cause.result)
    }

    /// Returns the result of instantiating the graph, which fails with the error of a refused node.
    fn node(&mut self, attribute: LaunchAttribute) -> u32 {
        self.graphs += 1;
        let graph = handle(self.graphs);
        assert_eq!(self.status(&GraphBegin { new: graph }), 0);
        let attributes = [attribute];
        let node = GraphKernel {
            graph,
            function: handle(1),
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes: Items::new(&attributes),
            parameters: &[0; 8],
        };
        assert_eq!(self.status(&node), 0);
        self.status(&GraphInstantiate { graph, flags: 0 })
    }

    fn question(&mut self, attribute: LaunchAttribute) -> u32 {
        self.status(&ClusterOccupancy {
            function: handle(1),
            question: ClusterQuestion::ActiveClusters,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes: Items::new(&[attribute]),
        })
    }

    fn stream(&mut self, attribute: LaunchAttribute) -> u32 {
        self.status(&StreamSetAttribute {
            stream: handle(1),
            id: attribute.id,
            value: attribute.value,
        })
    }
}

fn attribute(id: u32, words: [u64; 2]) -> LaunchAttribute {
    let mut value = [0; 64];
    value[..16].copy_from_slice(words.map(u64::to_le_bytes).as_flattened());
    LaunchAttribute {
        id,
        reserved: 0,
        value,
    }
}

#[test]
fn an_access_policy_window_lies_in_memory_of_the_session_wherever_it_is_set() {
    let mut ready = ready();
    let memory = ready.memory;
    for (address, bytes, result) in [
        (memory, BYTES, 0),
        (memory + 16, 16, 0),
        (0, 0, 0),
        (0x1234, 0, 0),
        (memory, BYTES + 1, INVALID_VALUE),
        (memory - 1, 1, INVALID_VALUE),
        (0, 16, INVALID_VALUE),
        (memory, u64::MAX, INVALID_VALUE),
        (u64::MAX, 16, INVALID_VALUE),
    ] {
        for (scope, set) in SCOPES {
            // Another session has this memory only by chance, so windows that are not empty are
            // invalid there.
            if scope == "later launch" && result == 0 && bytes != 0 {
                continue;
            }
            let window = attribute(1, [address, bytes]);
            let found = set(&mut ready, window);
            assert_eq!(found, result, "{scope}: {bytes} bytes at {address:#x}");
        }
    }
}

#[test]
fn attributes_that_may_carry_handles_are_refused_wherever_they_are_set() {
    let mut ready = ready();
    // An attribute of device-updatable nodes, and unassigned numbers.
    for id in [13, 15, 17, 18, 1000, u32::MAX] {
        for (scope, set) in SCOPES {
            let found = set(&mut ready, attribute(id, [0x7fff_0000_1000, 1]));
            assert_eq!(found, NOT_SUPPORTED, "{scope}: {id}");
        }
    }
    // Only launches record events.
    for id in [7, 12] {
        for (scope, set) in [SCOPES[2], SCOPES[3], SCOPES[4]] {
            let found = set(&mut ready, attribute(id, [0x7fff_0000_1000, 1]));
            assert_eq!(found, NOT_SUPPORTED, "{scope}: {id}");
        }
    }
}

//! Graph requests when no thread can be started. The only test of its process, because it lowers
//! the process's memory limit.

mod support;

use std::sync::Arc;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::Decode;
use wormhole_api::handle::Graph;
use wormhole_api::{
    ArrayCreate, ArrayDestroy, DevicePtr, GraphBegin, GraphCopy, GraphDestroy, GraphInstantiate,
    GraphLaunch, GraphUpdate, Handle, MemAlloc, MemAllocReply, Message,
};
use wormhole_device::Device;

const OPERATING_SYSTEM: u32 = wormhole_api::CuResult::OPERATING_SYSTEM.0;
const INVALID_HANDLE: u32 = wormhole_api::CuResult::INVALID_HANDLE.0;

struct Ready {
    device: Arc<Recorder>,
    served: Served,
    sequence: u64,
    memory: DevicePtr,
}

impl Ready {
    fn status<M: Message>(&mut self, slot: u32, message: &M) -> u32 {
        self.sequence += 1;
        self.served.ask(slot, self.sequence, message);
        self.served.answer(slot, self.sequence).0
    }

    /// Sends a request on a slot that has no thread yet, under a limit that prevents starting one.
    fn status_without_thread<M: Message>(&mut self, slot: u32, message: &M) -> u32 {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the place is writable.
        let asked = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
        assert_eq!(asked, 0);
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let tight = libc::rlimit {
            // Leaves less than the size of a stack.
            rlim_cur: pages * 4096 + (1 << 20),
            ..limit
        };
        // SAFETY: the limits are readable.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const tight) };
        assert_eq!(set, 0);
        let status = self.status(slot, message);
        // SAFETY: as above.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
        assert_eq!(set, 0);
        status
    }

    /// Describes a graph that copies to an array and then destroys the array's handle, so that only
    /// the graph uses it.
    fn describe(&mut self, index: u32) -> Handle<Graph> {
        let (array, graph) = (handle(index), handle(index));
        let create = ArrayCreate {
            new: array,
            extent: [16, 4, 0],
            format: 1,
            channels: 1,
            flags: 0,
        };
        assert_eq!(self.status(0, &create), 0);
        assert_eq!(self.status(0, &GraphBegin { new: graph }), 0);
        let copy = GraphCopy {
            graph,
            extent: [8, 4, 1],
            to_array: Some(array),
            to_origin: [0; 3],
            to_memory: DevicePtr(0),
            to_pitch: 0,
            to_rows: 0,
            from_array: None,
            from_origin: [0; 3],
            from_memory: self.memory,
            from_pitch: 64,
            from_rows: 4,
        };
        assert_eq!(self.status(0, &copy), 0);
        assert_eq!(self.status(0, &ArrayDestroy { array }), 0);
        graph
    }
}

#[test]
fn a_job_that_cannot_be_started_leaves_nothing_behind() {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 3);
    let payload = served.call(0, 1, &MemAlloc { bytes: 4096 });
    let mut ready = Ready {
        device,
        served,
        sequence: 1,
        memory: MemAllocReply::decode(&payload).unwrap().address,
    };
    let graph = ready.describe(1);
    let instantiate = GraphInstantiate { graph, flags: 0 };
    assert_eq!(
        ready.status_without_thread(5, &instantiate),
        OPERATING_SYSTEM
    );
    ready.device.wait_for("array_destroy", 1);
    assert_eq!(ready.status(0, &GraphDestroy { graph }), INVALID_HANDLE);
    // The handle is free again.
    assert_eq!(ready.describe(1), graph);
    assert_eq!(ready.status(5, &instantiate), 0);
    // An update that cannot start leaves the graph unchanged, and removes the description.
    let from = ready.describe(2);
    let update = GraphUpdate { graph, from };
    assert_eq!(ready.status_without_thread(6, &update), OPERATING_SYSTEM);
    ready.device.wait_for("array_destroy", 2);
    let launch = GraphLaunch {
        graph,
        stream: Handle::LEGACY,
    };
    assert_eq!(ready.status(0, &launch), 0);
    assert_eq!(ready.describe(2), from);
    assert_eq!(ready.status(6, &update), 0);
    ready.device.wait_for("array_destroy", 3);
    assert_eq!(ready.status(0, &GraphDestroy { graph }), 0);
    ready.device.wait_for("array_destroy", 4);
}

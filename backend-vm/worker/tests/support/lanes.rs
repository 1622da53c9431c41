//! A session whose launches go to lanes, with streams, a kernel, an event, a graph and memory.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use wormhole_api::constants::stream_flags::NON_BLOCKING;
use wormhole_api::handle::Graph;
use wormhole_api::{
    Decode, DevicePtr, Element, Event as EventKind, EventCreate, EventRecord, Fence, FenceWrite,
    Function, GraphBegin, GraphEmpty, GraphInstantiate, Handle, Items, LaunchKernel, MemAlloc,
    MemAllocReply, MemSet, Message, ModuleGetFunction, Stream, StreamCreate, StreamWaitEvent,
};
use wormhole_backend_tests::messages::module_load;
use wormhole_device::Device;
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_worker::Tuning;
use wormhole_worker::lanes::Plan;
use wormhole_worker::session::Event;

use super::recorder::Recorder;
use super::served::{Served, handle};

/// All launches that may go to lanes do.
pub const ALWAYS: Plan = Plan {
    most: 3,
    always: true,
};

/// Two streams that wait for the legacy stream, and two that do not.
pub const STREAMS: u32 = 4;

pub fn is_blocking(stream: u32) -> bool {
    stream <= 2
}

pub fn stream(index: u32) -> Handle<Stream> {
    match index {
        0 => Handle::LEGACY,
        index => handle(index),
    }
}

pub fn graph() -> Handle<Graph> {
    handle(1)
}

pub fn event() -> Handle<EventKind> {
    handle(1)
}

pub struct Ready {
    pub device: Arc<Recorder>,
    pub served: Served,
    pub memory: DevicePtr,
    sequence: u64,
    /// Memory that images are read from.
    image: Box<[AtomicU8; 64]>,
}

pub fn ready(lanes: Plan) -> Ready {
    ready_with(Tuning {
        lanes,
        ..Tuning::default()
    })
}

pub fn ready_with(tuning: Tuning) -> Ready {
    let device = Arc::new(Recorder::new());
    let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
    let served = Served::start_tuned(devices, 3, tuning);
    let image = Box::new([const { AtomicU8::new(0) }; 64]);
    let address = image.as_ptr().expose_provenance() as u64;
    served
        .notifier
        .send(Event::ExtentAdded { address, bytes: 64 });
    let mut ready = Ready {
        device,
        served,
        memory: DevicePtr(0),
        sequence: 0,
        image,
    };
    for index in 1..=STREAMS {
        ready.served.record(&StreamCreate {
            new: stream(index),
            flags: if is_blocking(index) { 0 } else { NON_BLOCKING },
            priority: 0,
        });
    }
    let new = event();
    // An event that launches may record.
    ready.served.record(&EventCreate { new, flags: 2 });
    let payload = ready.call(&MemAlloc { bytes: 64 });
    ready.memory = MemAllocReply::decode(&payload).unwrap().address;
    ready.call(&module_load(handle(1), DevicePtr(address), 64));
    ready.call(&ModuleGetFunction {
        module: handle(1),
        new: handle(1),
        name: b"kernel",
    });
    ready.call(&GraphBegin { new: graph() });
    ready.call(&GraphEmpty { graph: graph() });
    ready.call(&GraphInstantiate {
        graph: graph(),
        flags: 0,
    });
    ready
}

impl Ready {
    pub fn call<M: Message>(&mut self, message: &M) -> Vec<u8> {
        let sequence = self.ask(message);
        self.served.payload::<M>(0, sequence)
    }

    /// Sends a request once the one before is answered, and returns its number without waiting for its own answer.
    pub fn ask<M: Message>(&mut self, message: &M) -> u64 {
        if self.sequence > 0 {
            self.served.answer(0, self.sequence);
        }
        self.sequence += 1;
        self.served.ask(0, self.sequence, message);
        self.sequence
    }

    /// Loads another image, and returns its kernel.
    pub fn other_kernel(&mut self) -> Handle<Function> {
        let address = self.image.as_ptr().expose_provenance() as u64;
        self.call(&module_load(handle(2), DevicePtr(address), 64));
        self.call(&ModuleGetFunction {
            module: handle(2),
            new: handle(2),
            name: b"other",
        });
        handle(2)
    }

    pub fn fill(&self, on: u32, number: u32) -> MemSet {
        MemSet {
            destination: self.memory,
            pitch: 0,
            width: 1,
            height: 1,
            value: number,
            element: Element::Word,
            stream: stream(on),
        }
    }

    /// Loads the word of a fence.
    pub fn fence(&self, index: u32) -> u64 {
        let fences = Fences::new(self.served.memory());
        fences.load(FenceIndex::new(index).unwrap())
    }
}

impl Drop for Ready {
    /// Lets calls go, so that a test that fails ends.
    fn drop(&mut self) {
        for call in ["launch", "write_fence"] {
            self.device.let_go(call);
        }
    }
}

pub fn launch(on: u32, number: u32) -> LaunchKernel<'static> {
    LaunchKernel {
        function: handle(1),
        stream: stream(on),
        grid: [1; 3],
        block: [1; 3],
        shared: number,
        attributes: Items::new(&[]),
        parameters: &[0; 8],
    }
}

pub fn fence(on: u32, index: u32, value: u64) -> FenceWrite {
    FenceWrite {
        stream: stream(on),
        fence: Fence::new(index).unwrap(),
        value,
    }
}

pub fn record(on: u32, number: u32) -> EventRecord {
    EventRecord {
        event: event(),
        stream: stream(on),
        flags: number,
        fence: None,
        value: 0,
    }
}

pub fn wait(on: u32, number: u32) -> StreamWaitEvent {
    StreamWaitEvent {
        stream: stream(on),
        event: event(),
        flags: number,
    }
}

//! Two devices of one session: which objects may be used together, and work of one device ordered
//! in a stream of the other.

mod support;

use std::sync::Arc;

use support::served::{Served, handle};
use wormhole_api::{
    Access, Array, ArrayCreate, CuResult, Decode, DevicePtr, Element, Event as EventKind,
    EventCreate, EventElapsed, EventRecord, Function, Graph, GraphBegin, GraphCopy, GraphFill,
    GraphInstantiate, GraphLaunch, Handle, Items, LaunchKernel, MemAlloc, MemAllocReply, MemCopy,
    MemCopy3d, MemSet, Message, Module, ModuleGetFunction, Pool, PoolAlloc, PoolAllocReply,
    PoolDefault, PoolFree, PoolSetAccess, Stream, StreamCreate, SurfaceCreate, Synchronize,
};
use wormhole_backend_tests::messages::module_load;
use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::Device;
use wormhole_worker::session::Event;

const PAGE_BYTES: usize = 4096;
const PAGE: u64 = PAGE_BYTES as u64;
const WORDS: u64 = PAGE / 4;
const SUCCESS: u32 = CuResult::SUCCESS.0;
const FIRST: u16 = 0;
const SECOND: u16 = 1;
const LEGACY: Handle<Stream> = Handle::LEGACY;
const KERNEL: &str =
    ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing()\n{\nret;\n}\0";

/// A page that is registered with the devices.
#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

/// A session with two CPU devices and a page of arena.
struct Two {
    served: Served,
    page: *mut u8,
    sequence: u64,
}

impl Two {
    fn start() -> Self {
        let options = Options {
            memory: Some(64 << 20),
            ..Options::default()
        };
        let devices = CpuDevice::open_several(&options, 2).unwrap().into_iter();
        let devices: Vec<_> = devices
            .map(|device| Arc::new(device) as Arc<dyn Device>)
            .collect();
        let page = Box::leak(Box::new(Page([0; PAGE_BYTES]))).0.as_mut_ptr();
        let address = page.expose_provenance() as u64;
        // SAFETY: the page is never freed.
        unsafe { devices[0].register(address, PAGE) }.unwrap();
        let served = Served::start_on(devices, 5);
        let bytes = PAGE;
        served.notifier.send(Event::ExtentAdded { address, bytes });
        Self {
            served,
            page,
            sequence: 0,
        }
    }

    fn address(&self) -> DevicePtr {
        DevicePtr(self.page.expose_provenance() as u64)
    }

    fn word(&self) -> u32 {
        // SAFETY: aligned; the test has waited for the devices' writes.
        unsafe { self.page.cast::<u32>().read_volatile() }
    }

    fn result<M: Message>(&mut self, device: u16, message: &M) -> u32 {
        self.sequence += 1;
        self.served.on(device, self.sequence, message).0
    }

    fn does<M: Message>(&mut self, device: u16, message: &M) -> Vec<u8> {
        self.sequence += 1;
        let (result, payload) = self.served.on(device, self.sequence, message);
        assert_eq!(result, SUCCESS, "{}", M::NAME);
        payload
    }

    fn refuses<M: Message>(&mut self, device: u16, message: &M, error: CuResult) {
        assert_eq!(self.result(device, message), error.0, "{}", M::NAME);
    }

    fn allocate(&mut self, device: u16) -> DevicePtr {
        let payload = self.does(device, &MemAlloc { bytes: PAGE });
        MemAllocReply::decode(&payload).unwrap().address
    }

    /// Creates a stream and an event of a device, under this number.
    fn stream_and_event(
        &mut self,
        device: u16,
        number: u32,
    ) -> (Handle<Stream>, Handle<EventKind>) {
        let (stream, event) = (handle(number), handle(number));
        let create = StreamCreate {
            new: stream,
            flags: 1,
            priority: 0,
        };
        self.does(device, &create);
        let (new, flags) = (event, 0);
        self.does(device, &EventCreate { new, flags });
        (stream, event)
    }

    fn array(&mut self, device: u16, number: u32) -> Handle<Array> {
        let new = handle(number);
        let create = ArrayCreate {
            new,
            extent: [64, 8, 0],
            format: 1,
            channels: 1,
            flags: wormhole_api::array::SURFACE_LDST,
        };
        self.does(device, &create);
        new
    }

    /// Copies the first word at an address in a stream's order, and returns it.
    fn first_word(&mut self, device: u16, stream: Handle<Stream>, source: DevicePtr) -> u32 {
        let copy = MemCopy {
            destination: self.address(),
            source,
            bytes: 4,
            stream,
        };
        self.does(device, &copy);
        let stream = Some(stream);
        self.does(device, &Synchronize { stream });
        self.word()
    }
}

#[test]
fn objects_of_two_devices_do_not_go_together() {
    let mut two = Two::start();
    for (at, byte) in KERNEL.bytes().enumerate() {
        // SAFETY: inside the page, which no device uses yet.
        unsafe { two.page.add(at).write_volatile(byte) };
    }
    let module: Handle<Module> = handle(1);
    let load = module_load(module, two.address(), KERNEL.len() as u64);
    two.does(FIRST, &load);
    let function: Handle<Function> = handle(1);
    let find = ModuleGetFunction {
        module,
        new: function,
        name: b"nothing",
    };
    two.does(FIRST, &find);
    let (own, start) = two.stream_and_event(FIRST, 1);
    let (other, end) = two.stream_and_event(SECOND, 2);
    let launch = |stream| LaunchKernel {
        function,
        stream,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: Items::new(&[]),
        parameters: &[],
    };
    let record = |event, stream| EventRecord {
        event,
        stream,
        flags: 0,
        fence: None,
        value: 0,
    };
    // The stream's device executes the work, whichever device the message names.
    for device in [FIRST, SECOND] {
        two.does(device, &launch(own));
        two.refuses(device, &launch(other), CuResult::INVALID_HANDLE);
        two.does(device, &record(start, own));
        two.does(device, &record(end, other));
        two.refuses(device, &record(start, other), CuResult::INVALID_HANDLE);
        let elapsed = EventElapsed { start, end };
        two.refuses(device, &elapsed, CuResult::INVALID_HANDLE);
    }
    two.does(FIRST, &launch(LEGACY));
    two.refuses(SECOND, &launch(LEGACY), CuResult::INVALID_HANDLE);
    let array = two.array(FIRST, 1);
    two.refuses(SECOND, &SurfaceCreate { array }, CuResult::INVALID_HANDLE);
    two.does(FIRST, &SurfaceCreate { array });
}

fn graph_copy(graph: Handle<Graph>, to: Handle<Array>, from: DevicePtr) -> GraphCopy {
    GraphCopy {
        graph,
        extent: [64, 8, 1],
        to_array: Some(to),
        to_origin: [0; 3],
        to_memory: DevicePtr(0),
        to_pitch: 0,
        to_rows: 0,
        from_array: None,
        from_origin: [0; 3],
        from_memory: from,
        from_pitch: 64,
        from_rows: 8,
    }
}

#[test]
fn a_graph_is_of_one_device() {
    let mut two = Two::start();
    let array = two.array(FIRST, 1);
    let memory = two.allocate(FIRST);
    let flags = 0;
    for (device, number, result) in [
        (FIRST, 1, CuResult::SUCCESS),
        (SECOND, 2, CuResult::NOT_SUPPORTED),
    ] {
        let graph = handle(number);
        two.does(device, &GraphBegin { new: graph });
        two.does(device, &graph_copy(graph, array, memory));
        two.refuses(device, &GraphInstantiate { graph, flags }, result);
    }
    let graph = handle(2);
    let gone = CuResult::INVALID_HANDLE;
    two.refuses(
        SECOND,
        &GraphLaunch {
            graph,
            stream: LEGACY,
        },
        gone,
    );
}

#[test]
fn a_graph_is_launched_in_the_place_of_another_devices_stream() {
    let mut two = Two::start();
    let destination = two.allocate(SECOND);
    let graph = handle(1);
    two.does(SECOND, &GraphBegin { new: graph });
    let fill = GraphFill {
        graph,
        destination,
        pitch: 0,
        width: WORDS,
        height: 1,
        value: 77,
        element: Element::Word,
    };
    two.does(SECOND, &fill);
    two.does(SECOND, &GraphInstantiate { graph, flags: 0 });
    let (stream, _) = two.stream_and_event(FIRST, 1);
    for stream in [stream, LEGACY] {
        let clear = MemSet {
            destination,
            pitch: 0,
            width: WORDS,
            height: 1,
            value: 1,
            element: Element::Word,
            stream,
        };
        two.does(FIRST, &clear);
        two.does(FIRST, &GraphLaunch { graph, stream });
        assert_eq!(two.first_word(FIRST, stream, destination), 77);
    }
}

#[test]
fn memory_of_a_pool_serves_streams_of_other_devices() {
    let mut two = Two::start();
    let pool: Handle<Pool> = handle(1);
    two.does(SECOND, &PoolDefault { new: pool });
    let access = PoolSetAccess {
        pool,
        peer: FIRST.into(),
        access: Access::ReadWrite,
    };
    two.does(SECOND, &access);
    let (stream, _) = two.stream_and_event(FIRST, 1);
    let bytes = PAGE;
    let payload = two.does(
        FIRST,
        &PoolAlloc {
            pool,
            stream,
            bytes,
        },
    );
    let address = PoolAllocReply::decode(&payload).unwrap().address;
    let fill = MemSet {
        destination: address,
        pitch: 0,
        width: WORDS,
        height: 1,
        value: 11,
        element: Element::Word,
        stream,
    };
    two.does(FIRST, &fill);
    assert_eq!(two.first_word(FIRST, stream, address), 11);
    two.does(FIRST, &PoolFree { address, stream });
    let stream = Some(stream);
    two.does(FIRST, &Synchronize { stream });
}

#[test]
fn arrays_of_two_devices_are_copied_to_each_other() {
    let mut two = Two::start();
    let arrays = [two.array(FIRST, 1), two.array(SECOND, 2)];
    let source = two.allocate(FIRST);
    let fill = MemSet {
        destination: source,
        pitch: 0,
        width: WORDS,
        height: 1,
        value: 0x0102_0304,
        element: Element::Word,
        stream: LEGACY,
    };
    two.does(FIRST, &fill);
    let target = two.allocate(FIRST);
    let steps = [
        (Some(arrays[0]), None),
        (Some(arrays[1]), Some(arrays[0])),
        (None, Some(arrays[1])),
    ];
    for (to_array, from_array) in steps {
        let copy = MemCopy3d {
            extent: [64, 8, 1],
            to_array,
            to_origin: [0; 3],
            to_memory: target,
            to_pitch: 64,
            to_rows: 8,
            from_array,
            from_origin: [0; 3],
            from_memory: source,
            from_pitch: 64,
            from_rows: 8,
            stream: LEGACY,
        };
        two.does(FIRST, &copy);
    }
    assert_eq!(two.first_word(FIRST, LEGACY, target), 0x0102_0304);
}

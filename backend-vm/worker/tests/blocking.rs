//! Calls that block on the device do not delay the calls of other guest threads.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::handle::Key;
use wormhole_api::{
    ContextGetLimit, ContextGetLimitReply, ContextSetLimit, CuResult, Decode, DevicePtr, Element,
    Fence, FenceWrite, Function, FunctionGetAttribute, FunctionSetAttribute,
    FunctionSetCacheConfig, Handle, Items, LaunchKernel, LibraryGetModule, LibraryLoad,
    LibraryLoadReply, MemAlloc, MemAllocReply, MemFree, MemGetInfo, MemGetInfoReply, MemSet,
    Message, Module, ModuleGetFunction, ModuleGetGlobal, ModuleLoad, ModuleUnload, Occupancy,
    ResetPersistingL2, Stream, StreamCreate, StreamDestroy, StreamQuery, TakeOutput,
};
use wormhole_backend_tests::backend::wait_until;
use wormhole_backend_tests::messages::{library_load, module_load};
use wormhole_device::{Device, RawStream};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_worker::session::Event;

/// Bytes of an allocation that takes the driver long.
const LARGE: u64 = 65 << 20;

/// A session with a stream, an allocation, and a kernel of eight bytes of parameters.
struct Ready {
    device: Arc<Recorder>,
    served: Served,
    stream: Handle<Stream>,
    module: Handle<Module>,
    function: Handle<Function>,
    memory: DevicePtr,
    /// Memory that images are read from.
    image: Box<[u8; 64]>,
}

fn ready() -> Ready {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 3);
    let image = Box::new([0; 64]);
    served.notifier.send(Event::ExtentAdded {
        address: image.as_ptr().expose_provenance() as u64,
        bytes: image.len() as u64,
    });
    let mut ready = Ready {
        device,
        served,
        stream: handle(1),
        module: handle(1),
        function: handle(1),
        memory: DevicePtr(0),
        image,
    };
    ready.served.record(&StreamCreate {
        new: ready.stream,
        flags: 0,
        priority: 0,
    });
    let payload = ready.served.call(0, 1, &MemAlloc { bytes: 64 });
    ready.memory = MemAllocReply::decode(&payload).unwrap().address;
    ready.served.call(0, 2, &ready.load(ready.module));
    ready.served.call(0, 3, &ready.look_up(ready.function));
    ready
}

impl Ready {
    fn load(&self, new: Handle<Module>) -> ModuleLoad<'static> {
        module_load(
            new,
            DevicePtr(self.image.as_ptr().expose_provenance() as u64),
            self.image.len() as u64,
        )
    }

    fn look_up(&self, new: Handle<Function>) -> ModuleGetFunction<'static> {
        ModuleGetFunction {
            module: self.module,
            new,
            name: b"kernel",
        }
    }

    fn launch(&self, number: u32, parameters: &'static [u8]) -> LaunchKernel<'static> {
        LaunchKernel {
            function: self.function,
            stream: self.stream,
            grid: [1; 3],
            block: [1; 3],
            shared: number,
            attributes: Items::new(&[]),
            parameters,
        }
    }

    fn fill(&self, number: u32) -> MemSet {
        MemSet {
            destination: self.memory,
            pitch: 0,
            width: 1,
            height: 1,
            value: number,
            element: Element::Word,
            stream: self.stream,
        }
    }

    /// Checks that another thread is served while `request` waits in the device's call of this
    /// name.
    fn others_are_served_beside(&self, call: &'static str, round: u64, request: &impl Message) {
        let before = self.device.arrivals(call);
        self.device.hold(call);
        let sequence = 10 + round;
        self.served.ask(1, sequence, request);
        self.device.wait_for(call, before + 1);
        let number = 1000 + u32::try_from(round).unwrap();
        self.served.record(&self.fill(number));
        let stream = self.stream;
        self.served.ask(2, sequence, &StreamQuery { stream });
        self.served.answer(2, sequence);
        assert!(self.device.log().contains(&number), "beside {call}");
        assert!(!self.served.has_answer(1, sequence), "{call} waits");
        self.device.let_go(call);
        assert_eq!(self.served.answer(1, sequence).0, 0, "{call}");
    }
}

#[test]
fn a_request_that_waits_for_the_device_holds_nobody_up() {
    let ready = ready();
    ready.device.is_busy.store(true, Ordering::Release);
    let mut round = 0;
    macro_rules! beside {
        ($($call:literal => $message:expr;)*) => {$(
            round += 1;
            ready.others_are_served_beside($call, round, &$message);
        )*};
    }
    let function = ready.function;
    beside! {
        "mem_alloc" => MemAlloc { bytes: LARGE };
        "function" => ready.look_up(handle(2));
        "global" => ModuleGetGlobal { module: ready.module, name: b"table" };
        "launch" => ready.launch(1, &[0; 8]);
        "function_get_attribute" => FunctionGetAttribute { function, attribute: 0 };
        "function_set_attribute" => FunctionSetAttribute { function, attribute: 8, value: 1 };
        "function_set_cache_config" => FunctionSetCacheConfig { function, config: 1 };
        "occupancy" => Occupancy { function, block: 32, flags: 0, shared: 0 };
        "context_get_limit" => ContextGetLimit { limit: 0 };
        "set_limit" => ContextSetLimit { limit: 0, value: 1024 };
        "load" => ready.load(handle(2));
        "take_output" => TakeOutput {};
        "unload" => ModuleUnload { module: handle(2) };
    }
    // Freed last, because the fills name it.
    ready.device.hold("mem_free");
    let address = ready.memory;
    ready.served.ask(1, 90, &MemFree { address });
    ready.device.wait_for("mem_free", 1);
    let stream = ready.stream;
    ready.served.ask(2, 90, &StreamQuery { stream });
    ready.served.answer(2, 90);
    ready.device.let_go("mem_free");
    assert_eq!(ready.served.answer(1, 90).0, 0);
}

#[test]
fn a_brief_request_is_the_executors_while_no_job_is_underway() {
    let ready = ready();
    let (served, device, stream) = (&ready.served, &ready.device, ready.stream);
    served.call(1, 10, &StreamQuery { stream });
    served.call(1, 11, &MemGetInfo {});
    let executor = device.threads("query_stream");
    assert_eq!(device.threads("mem_get_info"), executor);
    let made = device.arrivals("mem_alloc");
    served.call(1, 14, &MemAlloc { bytes: 64 });
    assert_eq!(device.threads("mem_alloc")[made], executor[0]);

    device.hold("mem_alloc");
    served.ask(2, 10, &MemAlloc { bytes: LARGE });
    device.wait_for("mem_alloc", made + 2);
    // The driver may let no other call in meanwhile.
    device.hold("mem_get_info");
    served.ask(1, 12, &MemGetInfo {});
    device.wait_for("mem_get_info", 2);
    served.call(3, 10, &StreamQuery { stream });
    assert_ne!(device.threads("mem_get_info")[1], executor[0]);
    device.let_go("mem_get_info");
    assert_eq!(served.answer(1, 12).0, 0);
    device.let_go("mem_alloc");
    assert_eq!(served.answer(2, 10).0, 0);

    device.is_busy.store(true, Ordering::Release);
    device.hold("unload");
    served.call(2, 11, &ready.load(handle(2)));
    served.record(&ModuleUnload { module: handle(2) });
    device.wait_for("unload", 1);
    served.call(1, 13, &MemGetInfo {});
    assert_ne!(device.threads("mem_get_info")[2], executor[0]);
    device.let_go("unload");
}

/// The driver waits for the device's work in these calls, and in an image's first load for its compiler.
#[test]
fn a_request_that_waits_for_the_device_is_the_executors_while_that_has_no_work() {
    let ready = ready();
    let (served, device, stream) = (&ready.served, &ready.device, ready.stream);
    served.call(1, 10, &StreamQuery { stream });
    let executor = device.threads("query_stream")[0];
    for (round, (busy, streams)) in (1..).zip([(false, 1), (true, 1), (false, 40)]) {
        device.is_busy.store(busy, Ordering::Release);
        for number in 2..=streams {
            served.record(&StreamCreate {
                new: handle(number),
                flags: 0,
                priority: 0,
            });
        }
        let by = |call: &str| device.threads(call).pop() == Some(executor);
        let its_own = !busy && streams == 1;
        let sequence = 10 + 10 * round as u64;
        let payload = served.call(1, sequence, &MemAlloc { bytes: 64 });
        let address = MemAllocReply::decode(&payload).unwrap().address;
        served.call(1, sequence + 1, &MemFree { address });
        assert_eq!(by("mem_free"), its_own, "free: {busy}, {streams}");
        let payload = served.call(1, sequence + 4, &MemAlloc { bytes: LARGE });
        let address = MemAllocReply::decode(&payload).unwrap().address;
        served.call(1, sequence + 5, &MemFree { address });
        assert!(!by("mem_free"), "large: {busy}, {streams}");
        // `ready` has loaded the image once.
        served.call(1, sequence + 6, &ready.load(handle(2)));
        assert_eq!(by("load"), its_own, "load: {busy}, {streams}");
        served.record(&ModuleUnload { module: handle(2) });
        served.call(1, sequence + 7, &MemAlloc { bytes: 64 });
        device.wait_for("unload", round);
        assert_eq!(by("unload"), its_own, "unload: {busy}, {streams}");
    }
}

#[test]
fn an_image_that_was_only_asked_for_its_place_is_not_loaded_by_the_executor() {
    let ready = ready();
    let (served, device, stream) = (&ready.served, &ready.device, ready.stream);
    served.call(1, 10, &StreamQuery { stream });
    let executor = device.threads("query_stream")[0];
    device.wants_place.store(true, Ordering::Release);
    let image = ready.load(ready.module);
    let load = library_load(handle(1), image.image, image.bytes);
    let payload = served.call(1, 11, &load);
    assert_eq!(LibraryLoadReply::decode(&payload).unwrap().managed, 64);
    let placed = LibraryLoad {
        place: image.image,
        place_bytes: image.bytes,
        ..load
    };
    served.call(1, 12, &placed);
    assert_ne!(device.threads("load").pop(), Some(executor));
}

#[test]
fn a_first_launch_keeps_its_place_between_what_is_ordered_with_it() {
    let ready = ready();
    for round in 0..200 {
        let number = round * 10;
        ready.served.record(&ready.fill(number));
        let launch = ready.launch(number + 1, &[0; 8]);
        ready.served.call(1, 10 + u64::from(round), &launch);
        ready.served.record(&ready.fill(number + 2));
    }
    ready.served.call(2, 10, &MemGetInfo {});
    let log = ready.device.log();
    // The stream's creation is the first entry.
    assert_eq!(log.len(), 1 + 600);
    assert!(log.is_sorted(), "{log:?}");
}

#[test]
fn an_image_is_unloaded_when_no_job_uses_it() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    device.hold("launch");
    served.ask(1, 10, &ready.launch(1, &[0; 8]));
    device.wait_for("launch", 1);
    let module = ready.module;
    served.ask(2, 10, &ModuleUnload { module });
    // Calls after the request do not find the module any more.
    served.ask(3, 10, &ready.launch(2, &[0; 8]));
    assert_eq!(served.answer(3, 10).0, 400);
    assert_eq!(
        device.arrivals("unload"),
        0,
        "a kernel of it is being launched"
    );
    assert!(!served.has_answer(2, 10));
    device.let_go("launch");
    assert_eq!(served.answer(1, 10).0, 0);
    assert_eq!(served.answer(2, 10).0, 0);
    assert_eq!(device.arrivals("unload"), 1);
}

#[test]
fn an_image_that_nobody_waits_for_is_unloaded_when_no_job_uses_it() {
    let ready = ready();
    let (served, device, module) = (&ready.served, &ready.device, ready.module);
    device.is_busy.store(true, Ordering::Release);
    device.hold("unload");
    served.call(2, 10, &ready.load(handle(2)));
    served.record(&ModuleUnload { module: handle(2) });
    device.wait_for("unload", 1);
    // It holds nobody up.
    let stream = ready.stream;
    served.ask(3, 10, &StreamQuery { stream });
    served.answer(3, 10);
    device.let_go("unload");

    device.hold("launch");
    served.ask(1, 10, &ready.launch(1, &[0; 8]));
    device.wait_for("launch", 1);
    served.record(&ModuleUnload { module });
    served.ask(3, 11, &ready.launch(2, &[0; 8]));
    assert_eq!(served.answer(3, 11).0, 400);
    let used = "a kernel of it is being launched";
    assert_eq!(device.arrivals("unload"), 1, "{used}");
    device.let_go("launch");
    assert_eq!(served.answer(1, 10).0, 0);
    device.wait_for("unload", 2);
    let executor = device.threads("query_stream");
    let threads = device.threads("unload");
    assert!(threads.iter().all(|thread| !executor.contains(thread)));
    assert_eq!(served.status.load(), None);
    // A module that is gone ends the session, as in any record.
    served.record(&ModuleUnload { module });
    served.ask(3, 12, &StreamQuery { stream });
    served.answer(3, 12);
    let cause = served.status.load();
    assert_eq!(cause.map(|cause| cause.result), Some(400));
}

#[test]
fn memory_of_an_image_that_nobody_waits_for_is_there_for_an_allocation_or_image() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    let allocate = MemAlloc { bytes: 64 };
    let made = device.arrivals("mem_alloc");
    served.call(2, 10, &ready.load(handle(2)));
    device.lacks_memory.store(true, Ordering::Release);
    // Nothing is being unloaded.
    served.ask(1, 10, &allocate);
    assert_eq!(served.answer(1, 10).0, CuResult::OUT_OF_MEMORY.0);
    assert_eq!(device.arrivals("mem_alloc"), made + 1);

    device.is_busy.store(true, Ordering::Release);
    device.hold("unload");
    served.record(&ModuleUnload { module: handle(2) });
    device.wait_for("unload", 1);
    let loaded = device.arrivals("load");
    served.ask(1, 11, &allocate);
    served.ask(2, 11, &ready.load(handle(3)));
    device.wait_for("mem_alloc", made + 2);
    device.wait_for("load", loaded + 1);
    assert!(!device.comes_at_once("mem_alloc", made + 3));
    assert!(!served.has_answer(1, 11) && !served.has_answer(2, 11));
    device.lacks_memory.store(false, Ordering::Release);
    device.let_go("unload");
    assert_eq!([1, 2].map(|slot| served.answer(slot, 11).0), [0; 2]);
    assert_eq!(device.arrivals("mem_alloc"), made + 3);
    assert_eq!(device.arrivals("load"), loaded + 2);
}

#[test]
fn a_look_up_in_an_image_that_goes_meanwhile_is_an_invalid_handle() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    device.hold("function");
    served.ask(1, 10, &ready.look_up(handle(2)));
    device.wait_for("function", 2);
    let module = ready.module;
    served.ask(2, 10, &ModuleUnload { module });
    let stream = ready.stream;
    served.call(3, 10, &StreamQuery { stream });
    device.let_go("function");
    assert_eq!(served.answer(1, 10).0, 400);
    assert_eq!(served.answer(2, 10).0, 0);
}

/// Asserts that a look-up of a module's thing, in the device's function `call`, finds nothing for another image that has
/// been given the module's handle meanwhile.
fn finds_nothing_for_another_image(ready: &Ready, look_up: &impl Message, call: &'static str) {
    let (served, device, module) = (&ready.served, &ready.device, ready.module);
    let library = handle(1);
    let image = ready.load(module);
    let load = library_load(library, image.image, image.bytes);
    served.call(3, 10, &load);
    let before = device.arrivals(call);
    device.hold(call);
    served.ask(1, 10, look_up);
    device.wait_for(call, before + 1);
    served.ask(2, 10, &ModuleUnload { module });
    let new = module;
    served.call(3, 11, &LibraryGetModule { library, new });
    device.let_go(call);
    assert_eq!(served.answer(1, 10).0, CuResult::INVALID_HANDLE.0, "{call}");
    assert_eq!(served.answer(2, 10).0, 0);
    assert_eq!(device.arrivals("unload"), 1);
}

#[test]
fn a_variable_goes_with_its_image_though_another_image_has_the_handle() {
    let ready = ready();
    let (module, name) = (ready.module, b"variable");
    finds_nothing_for_another_image(&ready, &ModuleGetGlobal { module, name }, "global");
    let variable = DevicePtr(ready.device.last_made());
    let fill = MemSet {
        destination: variable,
        ..ready.fill(7)
    };
    ready.served.record(&fill);
    let stream = ready.stream;
    ready.served.call(3, 12, &StreamQuery { stream });
    assert!(!ready.device.log().contains(&7), "its memory is freed");
}

/// The driver tells the address of a variable by what the guest's image says.
#[test]
fn a_variable_at_an_address_of_the_guest_s_own_may_not_be_named() {
    let ready = ready();
    let (module, name, stream) = (ready.module, &b"variable"[..], ready.stream);
    for (round, (address, answer)) in [
        (0x7000_0000_0000, CuResult::INVALID_IMAGE),
        (0x6000_0001_0000, CuResult(0)),
    ]
    .into_iter()
    .enumerate()
    {
        let (sequence, number) = (10 + round as u64, 7 + u32::try_from(round).unwrap());
        ready.device.make_at(address);
        let look_up = ModuleGetGlobal { module, name };
        ready.served.ask(1, sequence, &look_up);
        assert_eq!(ready.served.answer(1, sequence).0, answer.0, "{address:#x}");
        let fill = MemSet {
            destination: DevicePtr(address),
            ..ready.fill(number)
        };
        ready.served.record(&fill);
        ready.served.call(2, sequence, &StreamQuery { stream });
        let is_filled = ready.device.log().contains(&number);
        assert_eq!(is_filled, answer.0 == 0, "{address:#x}");
    }
}

#[test]
fn a_kernel_goes_with_its_image_though_another_image_has_the_handle() {
    let ready = ready();
    let function = handle(2);
    finds_nothing_for_another_image(&ready, &ready.look_up(function), "function");
    let launch = LaunchKernel {
        function,
        ..ready.launch(7, &[0; 8])
    };
    ready.served.ask(1, 11, &launch);
    let refused = CuResult::INVALID_HANDLE.0;
    assert_eq!(ready.served.answer(1, 11).0, refused);
}

#[test]
fn parameters_that_are_shorter_than_the_kernel_s_never_reach_the_device() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    served.ask(1, 10, &ready.launch(1, &[0; 7]));
    assert_eq!(served.answer(1, 10).0, 1);
    served.ask(1, 11, &ready.launch(1, &[]));
    assert_eq!(served.answer(1, 11).0, 1);
    assert_eq!(device.arrivals("launch"), 0);
    served.call(1, 12, &ready.launch(1, &[0; 8]));
    assert_eq!(served.status.load(), None);
    served.record(&ready.launch(2, &[0; 4]));
    served.call(1, 13, &MemGetInfo {});
    assert_eq!(device.arrivals("launch"), 1);
    assert_eq!(served.status.load().map(|cause| cause.result), Some(1));
}

#[test]
fn what_a_guest_may_make_a_worker_hold_is_bounded() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    // Nothing is mapped there: copying the image would crash the test.
    let (address, bytes) = (1 << 44, 5 << 30);
    served.notifier.send(Event::ExtentAdded { address, bytes });
    let load = module_load(handle(2), DevicePtr(address), bytes);
    served.ask(1, 10, &load);
    assert_eq!(served.answer(1, 10).0, 2);
    // An image that is being loaded counts.
    device.is_busy.store(true, Ordering::Release);
    device.hold("load");
    served.ask(1, 11, &ready.load(handle(3)));
    device.wait_for("load", 2);
    served.ask(2, 11, &module_load(load.new, load.image, 4 << 30));
    assert_eq!(served.answer(2, 11).0, 2);
    device.let_go("load");
    assert_eq!(served.answer(1, 11).0, 0);
    let limits = [
        (1, 64 << 20, 0),
        (1, (64 << 20) + 1, 2),
        (2, 1 << 30, 0),
        (2, u64::MAX, 2),
    ];
    for (sequence, (limit, value, result)) in (20..).zip(limits) {
        served.ask(1, sequence, &ContextSetLimit { limit, value });
        assert_eq!(served.answer(1, sequence).0, result, "{limit} {value}");
    }
    assert_eq!(device.arrivals("set_limit"), 2);
}

#[test]
fn numbers_of_limits_that_no_driver_has_reach_none() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    for (sequence, limit) in (10..).step_by(2).zip([10, 11, 1 << 16, u32::MAX]) {
        served.ask(1, sequence, &ContextGetLimit { limit });
        assert_eq!(served.answer(1, sequence).0, 1, "{limit}");
        served.ask(1, sequence + 1, &ContextSetLimit { limit, value: 1 });
        assert_eq!(served.answer(1, sequence + 1).0, 1, "{limit}");
    }
    let known = ContextGetLimit { limit: 9 };
    served.call(1, 30, &known);
    let arrivals = ["context_get_limit", "set_limit"].map(|call| device.arrivals(call));
    assert_eq!(arrivals, [1, 0]);
}

#[test]
fn beside_neighbours_the_persisting_part_of_the_cache_is_nobodys() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    let (get, set) = (
        ContextGetLimit { limit: 6 },
        ContextSetLimit {
            limit: 6,
            value: 1 << 20,
        },
    );
    let arrivals = || {
        ["context_get_limit", "set_limit", "reset_persisting_l2"].map(|call| device.arrivals(call))
    };
    served.call(1, 10, &set);
    served.call(1, 11, &get);
    served.call(1, 12, &ResetPersistingL2 {});
    assert_eq!(arrivals(), [2, 1, 1]);
    served.neighbours.set(true);
    served.ask(1, 13, &set);
    assert_eq!(served.answer(1, 13).0, 215);
    let value = ContextGetLimitReply::decode(&served.call(1, 14, &get))
        .unwrap()
        .value;
    assert_eq!(value, 0);
    served.call(1, 15, &ResetPersistingL2 {});
    assert_eq!(arrivals(), [2, 1, 1]);
}

#[test]
fn a_neighbour_that_leaves_during_a_question_moves_no_figure() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    served.neighbours.set(true);
    device.hold("mem_get_info");
    served.ask(1, 10, &MemGetInfo {});
    wait_until(
        || device.arrivals("mem_get_info") == 1,
        || "the question".into(),
    );
    served.neighbours.set(false);
    device.let_go("mem_get_info");
    let (result, payload) = served.answer(1, 10);
    let reply = MemGetInfoReply::decode(&payload).unwrap();
    // All but the session's own 64 bytes. The recorder's figure is 0.
    assert_eq!((result, reply.free), (0, reply.total - 64));
}

#[test]
fn streams_that_are_destroyed_go_while_the_executor_is_busy() {
    const ROUNDS: u32 = 5000;
    let ready = ready();
    let served = &ready.served;
    let fences = Fences::new(served.memory());
    let word = FenceIndex::new(7).unwrap();
    let mut most = 0;
    for round in 1..=ROUNDS {
        let stream: Handle<Stream> = Handle::new(Key {
            index: 2,
            generation: u16::try_from(round % 4096).unwrap(),
        })
        .unwrap();
        served.record(&StreamCreate {
            new: stream,
            flags: 0,
            priority: 0,
        });
        let value = u64::from(round);
        served.record(&FenceWrite {
            stream,
            fence: Fence::new(7).unwrap(),
            value,
        });
        while fences.load(word) < value {
            std::thread::yield_now();
        }
        served.record(&StreamDestroy { stream });
        most = most.max(ready.device.alive());
    }
    assert!(most < 100, "{most} objects were alive at once");
}

#[test]
fn a_stream_that_is_destroyed_is_watched_until_its_fence_comes() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    let stream = handle(2);
    served.record(&StreamCreate {
        new: stream,
        flags: 0,
        priority: 0,
    });
    served.call(1, 10, &StreamQuery { stream });
    let raw = RawStream(device.last_made());
    device.withholds_fences.store(true, Ordering::Relaxed);
    served.record(&FenceWrite {
        stream,
        fence: Fence::new(7).unwrap(),
        value: 1,
    });
    served.record(&StreamDestroy { stream });
    served.ask(1, 11, &StreamQuery { stream });
    assert_eq!(served.answer(1, 11).0, 400);
    *device.faulted.lock().unwrap() = Some(raw);
    wait_until(
        || {
            served
                .status
                .load()
                .is_some_and(|cause| cause.result == 700)
        },
        || "the fault to be found".to_owned(),
    );
    let legacy = Handle::LEGACY;
    served.call(1, 12, &StreamQuery { stream: legacy });
    assert!(device.is_alive(raw.0), "destroyed while it is watched");
}

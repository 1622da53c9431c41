//! Tests that events of a launch are reached while its kernel runs.

use std::sync::atomic::{AtomicU32, Ordering};

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::{
    CuError, Device, DriverCalls, ImageKind, Jit, Launch, LaunchEvents, RawEvent, RawFunction,
    RawStream,
};

/// PTX of the kernels. `wait` triggers its dependents when the first word is not 0, and ends when the second is not 0;
/// one thread of each block polls both. `store` writes 1.
const KERNELS: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry wait(.param .u64 words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [words];
TRIGGER:
    ld.volatile.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra TRIGGER;
    griddepcontrol.launch_dependents;
END:
    ld.volatile.u32 %r1, [%rd1+4];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra END;
    ret;
}
.visible .entry store(.param .u64 word)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
    st.volatile.u32 [%rd1], 1;
    ret;
}
.visible .entry fault(.param .u64 words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [words];
WAIT:
    ld.volatile.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra WAIT;
    trap;
}
";

/// A page of words for registration with the device.
#[repr(align(4096))]
struct Words([AtomicU32; 1024]);

static WORDS: [Words; 2] = [const { Words([const { AtomicU32::new(0) }; 1024]) }; 2];

struct Kernels {
    device: CpuDevice,
    words: &'static [AtomicU32; 1024],
    functions: [RawFunction; 3],
}

impl Kernels {
    fn new(page: usize) -> Self {
        let device = CpuDevice::open(&Options {
            memory: Some(64 << 20),
            ..Options::default()
        })
        .expect("open");
        let words = &WORDS[page].0;
        // SAFETY: a static is never freed, and all accesses to it are atomic.
        unsafe { device.register(words.as_ptr().expose_provenance() as u64, 4096) }
            .expect("register");
        let module = device.load(
            KERNELS.as_bytes(),
            ImageKind::Module,
            &mut Jit::default(),
            None,
        );
        let module = module.and_then(wormhole_device::Loading::done);
        let module = module.expect("load").module;
        let functions = ["wait", "store", "fault"].map(|name| {
            let found = device.function(module, name);
            found.expect("a kernel").function
        });
        Self {
            device,
            words,
            functions,
        }
    }

    /// Launches a kernel on a word and the words behind it.
    fn launch(&self, kernel: usize, grid: u32, on: RawStream, word: usize, events: LaunchEvents) {
        let address = self.words[word..].as_ptr().expose_provenance() as u64;
        let launch = Launch {
            function: self.functions[kernel],
            stream: on,
            grid: [grid, 1, 1],
            block: [1; 3],
            shared: 0,
            attributes: &[],
            events,
            parameters: &address.to_le_bytes(),
        };
        self.device.launch(&launch).expect("launch");
    }

    fn set(&self, word: usize) {
        self.words[word].store(1, Ordering::Release);
    }

    fn complete(&self, event: RawEvent) -> bool {
        self.device.query_event(event).expect("query")
    }
}

#[test]
fn a_running_kernel_reaches_its_events() {
    let kernels = Kernels::new(0);
    let device = &kernels.device;
    let [running, behind_begun, behind_trigger] = [(); 3].map(|()| device.stream_create(1, 0));
    let running = running.expect("stream");
    let [begun, triggered, early] = [(); 3].map(|()| device.create_event(2).expect("event"));
    let events = LaunchEvents {
        programmatic: Some(triggered),
        at_block_start: false,
        begun: Some(begun),
    };
    kernels.launch(0, 3, running, 0, events);
    let none = LaunchEvents::default();
    for (stream, event, word) in [(behind_begun, begun, 8), (behind_trigger, triggered, 9)] {
        let stream = stream.expect("stream");
        device.wait_event(stream, event, 0).expect("wait");
        kernels.launch(1, 1, stream, word, none);
    }
    // All blocks have begun, and none has triggered.
    device.synchronize_event(begun).expect("synchronize");
    while kernels.words[8].load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    assert!(!kernels.complete(triggered));
    kernels.set(0);
    device.synchronize_event(triggered).expect("synchronize");
    assert!(!device.query_stream(running).expect("query"));
    // Work that waits on the device may use all writes of the kernel, so it waits for the end.
    assert!(
        !device
            .query_stream(behind_trigger.expect("stream"))
            .expect("query")
    );
    assert_eq!(kernels.words[9].load(Ordering::Acquire), 0);
    kernels.set(1);
    device.synchronize().expect("synchronize");
    assert_eq!(kernels.words[9].load(Ordering::Acquire), 1);

    // Blocks trigger by beginning: the gate of the next kernel's trigger is closed.
    let at_start = LaunchEvents {
        programmatic: Some(early),
        at_block_start: true,
        begun: None,
    };
    kernels.launch(0, 3, running, 16, at_start);
    device.synchronize_event(early).expect("synchronize");
    assert!(!device.query_stream(running).expect("query"));
    kernels.set(16);
    kernels.set(17);
    device.synchronize().expect("synchronize");
}

#[test]
fn a_fault_completes_no_event() {
    let kernels = Kernels::new(1);
    let device = &kernels.device;
    let triggered = device.create_event(2).expect("event");
    let events = LaunchEvents {
        programmatic: Some(triggered),
        ..LaunchEvents::default()
    };
    kernels.launch(2, 1, RawStream::LEGACY, 0, events);
    assert!(!kernels.complete(triggered));
    kernels.set(0);
    assert_eq!(device.synchronize_event(triggered), Err(CuError(719)));
    assert_eq!(device.query_event(triggered), Err(CuError(719)));
}

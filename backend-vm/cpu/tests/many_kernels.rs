//! Tests as many kernels at once as a device runs, whose blocks all wait for each other.

use std::fs;
use std::num::NonZero;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::constants::launch_attribute::COOPERATIVE;
use wormhole_device::constants::stream_flags::NON_BLOCKING;
use wormhole_device::{
    Device, DriverCalls, ImageKind, Jit, Launch, LaunchAttribute, LaunchEvents, MAX_KERNELS,
    STREAM_THREADS,
};

/// Blocks of a kernel, which one thread can have in progress.
const BLOCKS: u32 = 8;
/// Threads of the process that are none of the device's: its main one, and that of the test.
const OWN: usize = 2;

/// PTX of a kernel that counts its blocks in the first word, and waits until the second is not 0.
const MEET: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry meet(.param .u64 words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [words];
    atom.global.add.u32 %r1, [%rd1], 1;
wait:
    nanosleep.u32 1000000;
    ld.volatile.global.u32 %r2, [%rd1+4];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra wait;
    ret;
}
";

#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

fn threads() -> usize {
    let status = fs::read_to_string("/proc/self/status").expect("proc");
    let threads = status
        .lines()
        .find_map(|line| line.strip_prefix("Threads:"));
    threads.expect("a line").trim().parse().expect("a number")
}

#[test]
fn kernels_that_wait_for_each_other_have_no_more_helpers_than_there_are_processors() {
    let device = CpuDevice::open(&Options {
        memory: Some(64 << 20),
        ..Options::default()
    });
    let device = device.expect("open");
    let module = device.load(
        MEET.as_bytes(),
        ImageKind::Module,
        &mut Jit::default(),
        None,
    );
    let module = module.and_then(wormhole_device::Loading::done);
    let module = module.expect("load").module;
    let meet = device.function(module, "meet").expect("meet").function;
    let page: &'static Page = Box::leak(Box::new(Page([const { AtomicU32::new(0) }; 1024])));
    let [met, open, ..] = &page.0;
    let words = met.as_ptr().expose_provenance() as u64;
    // SAFETY: the page is never freed, and all accesses to it are atomic.
    let registered = unsafe { device.register(words, size_of::<Page>() as u64) };
    registered.expect("register");
    let stream = |_| device.stream_create(NON_BLOCKING, 0).expect("a stream");
    let streams: Vec<_> = (0..MAX_KERNELS).map(stream).collect();
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let mut cooperates = [0; 64];
    cooperates[0] = 1;
    for attributes in [vec![], vec![LaunchAttribute::new(COOPERATIVE, cooperates)]] {
        met.store(0, Ordering::Relaxed);
        open.store(0, Ordering::Release);
        for stream in &streams {
            let launched = device.launch(&Launch {
                function: meet,
                stream: *stream,
                grid: [BLOCKS, 1, 1],
                block: [1; 3],
                shared: 0,
                attributes: &attributes,
                events: LaunchEvents::default(),
                parameters: &words.to_le_bytes(),
            });
            launched.expect("launch");
        }
        while met.load(Ordering::Acquire) as usize != BLOCKS as usize * MAX_KERNELS {
            thread::yield_now();
        }
        let there = threads();
        assert!(
            there <= OWN + STREAM_THREADS + 1 + processors,
            "{there} threads"
        );
        open.store(1, Ordering::Release);
        device.synchronize().expect("synchronize");
    }
}

//! Tests ten thousand streams and events at once, with a bounded number of threads.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::constants::stream_flags::NON_BLOCKING;
use wormhole_device::{
    Device, DriverCalls, GraphDescription, GraphNode, Graphs, ImageKind, Jit, Launch, LaunchEvents,
    MemOps, MemoryOperation, MemoryOperationKind, RawFunction, RawStream, condition,
};

const MANY: usize = 10_000;
/// Far below the number of streams, but above the number of threads of a few devices and the test itself.
const MOST_THREADS: usize = 600;

/// PTX of the kernel `store`, which writes its second parameter to the word at the first.
const STORE: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 word, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
    ld.param.u32 %r1, [value];
    st.volatile.u32 [%rd1], %r1;
    ret;
}
";

#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

struct Bench {
    device: CpuDevice,
    store: RawFunction,
    /// Word that the host writes. `words` holds one word for each stream.
    word: &'static AtomicU32,
    words: Vec<&'static AtomicU32>,
}

impl Bench {
    fn new() -> Self {
        let device = CpuDevice::open(&Options {
            memory: Some(64 << 20),
            ..Options::default()
        });
        let device = device.expect("open");
        let module = device.load(
            STORE.as_bytes(),
            ImageKind::Module,
            &mut Jit::default(),
            None,
        );
        let module = module.and_then(wormhole_device::Loading::done);
        let module = module.expect("load").module;
        let store = device.function(module, "store").expect("store").function;
        let pages: Vec<Page> = (0..=MANY / 1024)
            .map(|_| Page([const { AtomicU32::new(0) }; 1024]))
            .collect();
        let pages: &'static [Page] = pages.leak();
        let mut words: Vec<_> = pages.iter().flat_map(|page| &page.0).collect();
        // SAFETY: the pages are never freed, and all accesses to them are atomic.
        let registered = unsafe { device.register(address(words[0]), words.len() as u64 * 4) };
        registered.expect("register");
        let word = words.pop().expect("more words than streams");
        Self {
            device,
            store,
            word,
            words,
        }
    }

    fn streams(&self, flags: u32) -> Vec<RawStream> {
        let stream = |_| self.device.stream_create(flags, 0).expect("a stream");
        (0..MANY).map(stream).collect()
    }

    fn launch(&self, stream: RawStream, number: usize) {
        let mut parameters = address(self.words[number]).to_le_bytes().to_vec();
        parameters.extend(value(number).to_le_bytes());
        let launched = self.device.launch(&Launch {
            function: self.store,
            stream,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &parameters,
        });
        launched.expect("launch");
    }

    fn wait(&self) -> MemoryOperation {
        MemoryOperation {
            kind: MemoryOperationKind::Wait32,
            flags: condition::EQ,
            address: address(self.word),
            value: 1,
        }
    }

    fn assert_all_ran(&self) {
        let wrong = (0..MANY).find(|number| self.read(*number) != value(*number));
        assert_eq!(wrong, None);
    }

    fn read(&self, number: usize) -> u32 {
        self.words[number].load(Ordering::Acquire)
    }
}

fn address(word: &AtomicU32) -> u64 {
    word.as_ptr().expose_provenance() as u64
}

fn value(number: usize) -> u32 {
    u32::try_from(number).expect("few") + 1
}

fn assert_few_threads() {
    let status = fs::read_to_string("/proc/self/status").expect("proc");
    let threads = status
        .lines()
        .find_map(|line| line.strip_prefix("Threads:"));
    let threads: usize = threads.expect("a line").trim().parse().expect("a number");
    assert!(threads <= MOST_THREADS, "{threads} threads");
}

#[test]
fn kernels_of_ten_thousand_streams_run() {
    let bench = Bench::new();
    let streams = bench.streams(0);
    for (number, stream) in streams.iter().enumerate() {
        bench.launch(*stream, number);
    }
    assert_few_threads();
    bench.device.synchronize().expect("synchronize");
    bench.assert_all_ran();
    for stream in streams {
        assert_eq!(bench.device.query_stream(stream), Ok(true));
        bench.device.destroy_stream(stream).expect("destroy");
    }
}

#[test]
fn ten_thousand_streams_wait_for_a_word_and_are_destroyed_meanwhile() {
    let bench = Bench::new();
    let streams = bench.streams(NON_BLOCKING);
    for (number, stream) in streams.iter().enumerate() {
        let wait = bench.device.memory_operations(*stream, &[bench.wait()]);
        wait.expect("wait");
        bench.launch(*stream, number);
    }
    for stream in &streams[..MANY / 2] {
        bench.device.destroy_stream(*stream).expect("destroy");
    }
    assert_few_threads();
    let last = streams[MANY - 1];
    assert_eq!(bench.device.query_stream(last), Ok(false));
    assert!((0..MANY).all(|number| bench.read(number) == 0));
    bench.word.store(1, Ordering::Release);
    bench.device.synchronize().expect("synchronize");
    bench.assert_all_ran();
}

#[test]
fn ten_thousand_events_order_as_many_streams() {
    let bench = Bench::new();
    let streams = bench.streams(NON_BLOCKING);
    let wait = bench.device.memory_operations(streams[0], &[bench.wait()]);
    wait.expect("wait");
    let mut before = None;
    let mut events = Vec::new();
    for (number, stream) in streams.iter().enumerate() {
        if let Some(event) = before {
            bench.device.wait_event(*stream, event, 0).expect("wait");
        }
        bench.launch(*stream, number);
        let event = bench.device.create_event(0).expect("an event");
        let recorded = bench.device.record_event(event, *stream, 0);
        recorded.expect("record");
        before = Some(event);
        events.push(event);
    }
    assert_few_threads();
    assert_eq!(bench.device.query_event(events[0]), Ok(false));
    assert!((0..MANY).all(|number| bench.read(number) == 0));
    bench.word.store(1, Ordering::Release);
    bench
        .device
        .synchronize_event(events[MANY - 1])
        .expect("synchronize");
    bench.assert_all_ran();
    let ordered = events.windows(2).all(|pair| {
        let elapsed = bench.device.event_elapsed(pair[0], pair[1]);
        elapsed.expect("both are timed") >= 0.0
    });
    assert!(ordered);
}

/// Each graph waits in two branches.
#[test]
fn graphs_that_wait_have_no_threads() {
    const GRAPHS: usize = 1000;
    let bench = Bench::new();
    for number in 0..GRAPHS {
        let store = |word: usize| {
            GraphNode::Memory(vec![
                bench.wait(),
                MemoryOperation {
                    kind: MemoryOperationKind::Write32,
                    flags: 0,
                    address: address(bench.words[word]),
                    value: 7,
                },
            ])
        };
        let graph = GraphDescription {
            nodes: vec![store(number), store(GRAPHS + number)],
            ..GraphDescription::default()
        };
        let graph = bench.device.instantiate(&graph, 0).expect("instantiate");
        let stream = bench.device.stream_create(NON_BLOCKING, 0);
        let launched = bench.device.launch_graph(graph, stream.expect("a stream"));
        launched.expect("launch");
        bench.device.destroy_graph(graph).expect("destroy");
    }
    assert_few_threads();
    assert!((0..MANY).all(|number| bench.read(number) == 0));
    // The waiting graphs do not delay a kernel.
    let stream = bench.device.stream_create(NON_BLOCKING, 0);
    let stream = stream.expect("a stream");
    bench.launch(stream, MANY - 1);
    bench
        .device
        .synchronize_stream(stream)
        .expect("synchronize");
    bench.word.store(1, Ordering::Release);
    bench.device.synchronize().expect("synchronize");
    assert!((0..2 * GRAPHS).all(|number| bench.read(number) == 7));
}

//! Tests refusals of misuse whose result is undefined on the native driver.

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::{
    CuError, Device, DriverCalls as _, Fill, ImageKind, Jit, Launch, LaunchEvents, RawEvent,
    RawFunction, RawModule, RawStream,
};

const LEGACY: RawStream = RawStream::LEGACY;
const STORE: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";
const FAULT: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry fault()
{
    trap;
    ret;
}
";

fn device() -> CpuDevice {
    CpuDevice::open(&Options {
        memory: Some(64 << 20),
        ..Default::default()
    })
    .expect("open")
}

fn load(device: &CpuDevice, text: &str) -> Result<RawModule, CuError> {
    let loaded = device.load(
        text.as_bytes(),
        ImageKind::Module,
        &mut Jit::default(),
        None,
    )?;
    Ok(loaded.done()?.module)
}

fn store(device: &CpuDevice, address: u64) -> Result<(), CuError> {
    let module = load(device, STORE)?;
    let function = device.function(module, "store")?.function;
    device.launch(&Launch {
        function,
        stream: LEGACY,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: &[],
        events: LaunchEvents::default(),
        parameters: &address.to_le_bytes(),
    })?;
    device.synchronize()
}

#[test]
fn copies_and_fills_stay_inside_allocations() {
    let device = device();
    let (first, second) = (
        device.mem_alloc(1024).expect("allocate"),
        device.mem_alloc(1024).expect("allocate"),
    );
    assert_eq!(
        second,
        first + 1024,
        "neighbours, so that a copy across both could work"
    );
    let refused = Err(CuError::INVALID_VALUE);
    assert_eq!(device.mem_copy(first, second, 1025, LEGACY), refused);
    assert_eq!(device.mem_copy(second, first, 1025, LEGACY), refused);
    assert_eq!(device.mem_copy(first, 4096, 8, LEGACY), refused);
    assert_eq!(device.write(first + 1020, &[0; 8], LEGACY), refused);
    let fill = Fill {
        destination: first,
        pitch: 0,
        width: 256,
        height: 1,
        value: 0,
        element: 4,
    };
    assert_eq!(device.fill(fill, LEGACY), Ok(()));
    for wrong in [
        Fill { width: 257, ..fill },
        Fill { element: 3, ..fill },
        Fill {
            destination: first + 2,
            width: 1,
            ..fill
        },
        Fill {
            width: u64::MAX,
            ..fill
        },
        Fill {
            width: 2,
            height: 2,
            pitch: 4,
            ..fill
        },
        Fill {
            width: 2,
            height: u64::MAX,
            pitch: 8,
            ..fill
        },
        Fill {
            width: 2,
            height: 3,
            pitch: 512,
            ..fill
        },
    ] {
        assert_eq!(device.fill(wrong, LEGACY), refused, "{wrong:?}");
    }
    assert_eq!(device.synchronize(), Ok(()));
}

#[test]
fn a_fence_lies_aligned_in_known_memory() {
    let device = device();
    let address = device.mem_alloc(64).expect("allocate");
    assert_eq!(
        device.write_fence(LEGACY, 4096, 1),
        Err(CuError::INVALID_VALUE)
    );
    assert_eq!(
        device.write_fence(LEGACY, address + 4, 1),
        Err(CuError::INVALID_VALUE)
    );
    assert_eq!(device.write_fence(LEGACY, address, 1), Ok(()));
}

#[test]
fn unknown_handles_are_refused() {
    let device = device();
    let refused = CuError::INVALID_HANDLE;
    for number in [0, 2, 3, 17, u64::MAX] {
        let stream = RawStream(number);
        assert_eq!(device.query_stream(stream), Err(refused));
        assert_eq!(device.synchronize_stream(stream), Err(refused));
        assert_eq!(device.destroy_stream(stream), Err(refused));
        assert_eq!(
            device.write_fence(stream, device.mem_alloc(8).expect("allocate"), 1),
            Err(refused)
        );
        assert_eq!(device.query_event(RawEvent(number)), Err(refused));
        assert_eq!(
            device.record_event(RawEvent(number), LEGACY, 0),
            Err(refused)
        );
        assert_eq!(device.unload(RawModule(number)), Err(refused));
        assert_eq!(
            device.function_get_attribute(RawFunction(number), 0),
            Err(refused)
        );
    }
}

#[test]
fn a_kernel_that_uses_freed_memory_faults() {
    let device = device();
    let address = device.mem_alloc(64).expect("allocate");
    assert_eq!(store(&device, address), Ok(()));
    device.mem_free(address).expect("free");
    assert_eq!(store(&device, address), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(
        device.mem_free(address),
        Err(CuError::ILLEGAL_ADDRESS),
        "the fault is sticky"
    );
}

#[test]
fn a_kernel_that_leaves_its_allocation_faults() {
    let device = device();
    let address = device.mem_alloc(512).expect("allocate");
    assert_eq!(store(&device, address + 508), Ok(()));
    assert_eq!(store(&device, address + 512), Err(CuError::ILLEGAL_ADDRESS));
}

#[test]
fn dropping_the_device_ends_kernels_that_would_run_forever() {
    const FOREVER: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry forever()
{
AGAIN:
    bra AGAIN;
}
";
    let device = device();
    let module = load(&device, FOREVER).expect("load");
    let function = device
        .function(module, "forever")
        .expect("function")
        .function;
    let launch = Launch {
        function,
        stream: LEGACY,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: &[],
        events: LaunchEvents::default(),
        parameters: &[],
    };
    device.launch(&launch).expect("launch");
    assert_eq!(device.query_stream(LEGACY), Ok(false));
    drop(device);
}

/// The grid has nearly 2^63 blocks.
#[test]
fn the_largest_grid_runs_until_the_device_is_dropped() {
    let device = device();
    let word = Pages::new(4096);
    // SAFETY: the page is never freed.
    unsafe { device.register(word.address(), 4096) }.expect("register");
    let module = load(&device, STORE).expect("load");
    let function = device.function(module, "store").expect("store").function;
    let launch = Launch {
        function,
        stream: LEGACY,
        grid: [i32::MAX.cast_unsigned(), 65535, 65535],
        block: [1; 3],
        shared: 0,
        attributes: &[],
        events: LaunchEvents::default(),
        parameters: &word.address().to_le_bytes(),
    };
    device.launch(&launch).expect("launch");
    while word.read(0) == 0 {
        assert_eq!(device.query_stream(LEGACY), Ok(false));
        std::thread::yield_now();
    }
    drop(device);
}

/// Host memory of whole pages.
struct Pages(*mut u8, usize);

impl Pages {
    fn new(bytes: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).expect("small");
        // SAFETY: not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!start.is_null());
        Self(start, bytes)
    }

    fn address(&self) -> u64 {
        self.0.expose_provenance() as u64
    }

    fn read(&self, index: usize) -> u8 {
        assert!(index < self.1);
        // SAFETY: inside the pages, which are never freed.
        unsafe { self.0.add(index).read_volatile() }
    }
}

#[test]
fn host_memory_that_a_dead_context_lets_go_of_is_in_use_no_more() {
    const BYTES: usize = 32 << 20;
    let device = device();
    let pages = Pages::new(BYTES);
    // SAFETY: the pages are never freed.
    unsafe { device.register(pages.address(), BYTES as u64) }.expect("register");
    let [filled, faulty] = [(); 2].map(|()| device.stream_create(1, 0).expect("a stream"));
    let module = load(&device, FAULT).expect("an image");
    let function = device.function(module, "fault").expect("a kernel").function;
    // Byte by byte, so that it takes a while.
    let fill = Fill {
        destination: pages.address(),
        pitch: 1,
        width: 1,
        height: BYTES as u64,
        value: 7,
        element: 1,
    };
    device.fill(fill, filled).expect("a fill");
    while pages.read(0) == 0 {
        std::thread::yield_now();
    }
    let launch = Launch {
        function,
        stream: faulty,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: &[],
        events: LaunchEvents::default(),
        parameters: &[],
    };
    device.launch(&launch).expect("a launch");
    while device.health(&[]).is_none() {
        std::thread::yield_now();
    }
    let died = device.unregister(pages.address());
    assert_eq!(died, Err(CuError(719)));
    assert_eq!(pages.read(BYTES - 1), 7, "the fill goes on");
}

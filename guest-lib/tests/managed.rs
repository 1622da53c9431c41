//! Managed memory: calls that are refused, attributes that are stored, and messages to the device.

mod support;

use std::ffi::c_void;
use std::ptr::null_mut;

use cuda as _;
use support::{Backend, in_process};
use wormhole_api::constants::memory_location;
use wormhole_api::ctypes::CUmemLocation;

const DEVICE: CUmemLocation = location(memory_location::DEVICE, 0);
const NO_DEVICE: CUmemLocation = location(memory_location::DEVICE, 9);
const HOST: CUmemLocation = location(memory_location::HOST, 0);
const NODE: CUmemLocation = location(memory_location::HOST_NUMA, 0);
const NODE_HERE: CUmemLocation = location(memory_location::HOST_NUMA_CURRENT, 0);
const NO_NODE: CUmemLocation = location(memory_location::HOST_NUMA, 99);
const NOWHERE: CUmemLocation = location(memory_location::INVALID, 0);

const fn location(r#type: u32, id: i32) -> CUmemLocation {
    CUmemLocation { r#type, id }
}

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuStreamCreate(stream: *mut *mut c_void, flags: u32) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuMemFreeHost(pointer: *mut c_void) -> u32;
    fn cuMemcpyHtoD_v2(destination: u64, source: *const c_void, bytes: usize) -> u32;
    fn cuMemAdvise(address: u64, bytes: usize, advice: u32, device: i32) -> u32;
    fn cuMemAdvise_v2(address: u64, bytes: usize, advice: u32, location: CUmemLocation) -> u32;
    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: i32, stream: *mut c_void) -> u32;
    fn cuMemPrefetchAsync_v2(
        address: u64,
        bytes: usize,
        location: CUmemLocation,
        flags: u32,
        stream: *mut c_void,
    ) -> u32;
    fn cuMemPrefetchBatchAsync(
        addresses: *const u64,
        sizes: *const usize,
        count: usize,
        locations: *const CUmemLocation,
        indices: *const usize,
        number: usize,
        flags: u64,
        stream: *mut c_void,
    ) -> u32;
    fn cuMemDiscardBatchAsync(
        addresses: *const u64,
        sizes: *const usize,
        count: usize,
        flags: u64,
        stream: *mut c_void,
    ) -> u32;
    fn cuMemDiscardAndPrefetchBatchAsync(
        addresses: *const u64,
        sizes: *const usize,
        count: usize,
        locations: *const CUmemLocation,
        indices: *const usize,
        number: usize,
        flags: u64,
        stream: *mut c_void,
    ) -> u32;
    fn cuMemRangeGetAttribute(
        data: *mut c_void,
        size: usize,
        attribute: u32,
        address: u64,
        bytes: usize,
    ) -> u32;
    fn cuMemRangeGetAttributes(
        data: *mut *mut c_void,
        sizes: *const usize,
        attributes: *const u32,
        number: usize,
        address: u64,
        bytes: usize,
    ) -> u32;
    fn cuStreamAttachMemAsync(stream: *mut c_void, address: u64, length: usize, flags: u32) -> u32;
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: u64) -> u32;
}

const BYTES: usize = 64 << 10;

struct Ready {
    backend: Backend,
    stream: *mut c_void,
    managed: u64,
    device: u64,
}

fn ready() -> Ready {
    let backend = Backend::start();
    let (mut context, mut stream) = (null_mut(), null_mut());
    let (mut managed, mut device) = (0, 0);
    // SAFETY: every place is writable.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
        assert_eq!(cuMemAllocManaged(&raw mut managed, BYTES, 1), 0);
        // Too large for a slab: the answer comes after what was sent before.
        assert_eq!(cuMemAlloc_v2(&raw mut device, 2 << 20), 0);
    }
    backend.shared.take();
    Ready {
        backend,
        stream,
        managed,
        device,
    }
}

/// Returns a range attribute of one word.
fn word(attribute: u32, address: u64, bytes: usize) -> i32 {
    let mut value = 77_i32;
    // SAFETY: the place is writable for its size.
    let result =
        unsafe { cuMemRangeGetAttribute((&raw mut value).cast(), 4, attribute, address, bytes) };
    assert_eq!(result, 0, "attribute {attribute}");
    value
}

/// A thread may query a pointer before it has a context, as with the native driver.
#[test]
fn a_thread_without_a_context_learns_what_a_pointer_is() {
    in_process(|| {
        let ready = ready();
        let asked = std::thread::scope(|scope| {
            let ask = || {
                let mut managed = 7_u32;
                let place = (&raw mut managed).cast();
                // SAFETY: the place is as wide as the attribute.
                let result = unsafe { cuPointerGetAttribute(place, 8, ready.managed) };
                (result, managed)
            };
            scope.spawn(ask).join().expect("it asks")
        });
        assert_eq!(asked, (0, 1));
    });
}

#[test]
fn host_and_device_have_one_address_for_it() {
    in_process(|| {
        let ready = ready();
        let (mut kind, mut managed, mut host) = (0_u32, 7_u32, 0_u64);
        let source = [0x5a_u8; BYTES];
        let supported = |attribute| {
            let mut value = 7;
            // SAFETY: the place is writable.
            let asked = unsafe { cuDeviceGetAttribute(&raw mut value, attribute, 0) };
            assert_eq!(asked, 0);
            value
        };
        assert_eq!([83, 89, 101].map(supported), [1, 1, 0]);
        // SAFETY: every place is as wide as its attribute, and the source is readable.
        unsafe {
            let inside = ready.managed + 100;
            assert_eq!(cuPointerGetAttribute((&raw mut kind).cast(), 2, inside), 0);
            assert_eq!(
                cuPointerGetAttribute((&raw mut managed).cast(), 8, inside),
                0
            );
            assert_eq!(cuPointerGetAttribute((&raw mut host).cast(), 4, inside), 0);
            assert_eq!((kind, managed, host), (2, 1, inside));
            assert_eq!(
                cuPointerGetAttribute((&raw mut managed).cast(), 8, ready.device),
                0
            );
            assert_eq!(managed, 0);
            assert_eq!(
                cuMemcpyHtoD_v2(ready.managed, source.as_ptr().cast(), BYTES),
                0
            );
            let address = usize::try_from(ready.managed).expect("64 bits");
            let bytes = std::ptr::with_exposed_provenance::<u8>(address);
            assert_eq!(std::slice::from_raw_parts(bytes, BYTES), source);
            assert_eq!(
                cuMemFreeHost(bytes.cast_mut().cast()),
                1,
                "it is not page-locked memory"
            );
            assert_eq!(cuMemFree_v2(ready.managed + 8), 1);
            assert_eq!(cuMemFree_v2(ready.managed), 0);
            assert_eq!(cuMemFree_v2(ready.managed), 1);
            let mut again = 0;
            assert_eq!(cuMemAllocManaged(&raw mut again, BYTES, 2), 0);
            assert_eq!(again, ready.managed, "its memory is used again");
            assert_eq!(word(1, again, BYTES), 0);
        }
        assert_eq!(
            ready.backend.shared.take(),
            [""; 0],
            "the device has nothing to do"
        );
    });
}

#[test]
fn sizes_and_flags_that_make_no_sense_are_refused() {
    in_process(|| {
        let _ready = ready();
        let mut address = 0;
        // SAFETY: the place is writable or null.
        unsafe {
            assert_eq!(cuMemAllocManaged(&raw mut address, 0, 1), 1);
            for flags in [0, 3, 4, 8] {
                assert_eq!(cuMemAllocManaged(&raw mut address, 1, flags), 1, "{flags}");
            }
            assert_eq!(cuMemAllocManaged(null_mut(), 1, 1), 1);
            assert_eq!(cuMemAllocManaged(&raw mut address, 1 << 40, 1), 2);
        }
        assert_eq!(address, 0);
    });
}

#[test]
fn advice_is_kept_by_the_page() {
    in_process(|| {
        let ready = ready();
        let advise = |offset: u64, bytes, advice, location| {
            // SAFETY: takes no pointer of this process.
            unsafe { cuMemAdvise_v2(ready.managed + offset, bytes, advice, location) }
        };
        // READ_MOSTLY ignores the location.
        assert_eq!(advise(4096, 8192, 1, NOWHERE), 0);
        assert_eq!(word(1, ready.managed + 4096, 8192), 1);
        assert_eq!(word(1, ready.managed, 8192), 0);
        assert_eq!(advise(5000, 1, 2, NOWHERE), 0);
        assert_eq!(word(1, ready.managed + 4096, 1), 0);
        assert_eq!(word(1, ready.managed + 8192, 4096), 1);
        // The preferred location, by the old and the new attributes.
        let preferred = || [2, 5, 6].map(|attribute| word(attribute, ready.managed, BYTES));
        assert_eq!(preferred(), [-2, 0, -2]);
        assert_eq!(advise(0, BYTES, 3, DEVICE), 0);
        assert_eq!(preferred(), [0, 1, 0]);
        assert_eq!(advise(0, BYTES, 3, NODE), 0);
        assert_eq!(preferred(), [-1, 3, 0]);
        assert_eq!(advise(0, BYTES, 3, NODE_HERE), 0);
        assert_eq!(preferred(), [-1, 4, 0]);
        // SAFETY: takes no pointer of this process.
        assert_eq!(unsafe { cuMemAdvise(ready.managed, BYTES, 3, -1) }, 0);
        assert_eq!(preferred(), [-1, 2, -1]);
        assert_eq!(advise(0, 1, 4, NOWHERE), 0);
        assert_eq!(preferred(), [-2, 0, -2], "not all of it");
        // ACCESSED_BY.
        let accessors = |bytes| {
            let mut list = [77_i32; 3];
            let place = (&raw mut list).cast();
            // SAFETY: the place is writable for its size.
            let asked = unsafe { cuMemRangeGetAttribute(place, 12, 3, ready.managed, bytes) };
            assert_eq!(asked, 0);
            list
        };
        assert_eq!(accessors(BYTES), [-2, -2, -2]);
        assert_eq!(advise(0, BYTES, 5, DEVICE), 0);
        assert_eq!(advise(0, 4096, 5, HOST), 0);
        assert_eq!(accessors(4096), [0, -1, -2]);
        assert_eq!(accessors(BYTES), [0, -2, -2]);
        assert_eq!(advise(0, BYTES, 6, DEVICE), 0);
        assert_eq!(accessors(4096), [-1, -2, -2]);
        // Several attributes in one call.
        let (mut one, mut two) = (77_i32, [77_i32; 2]);
        let mut places = [(&raw mut one).cast(), (&raw mut two).cast()];
        let (sizes, attributes) = ([4, 8], [1, 3]);
        // SAFETY: each place is writable for its size.
        let asked = unsafe {
            let (sizes, attributes) = (sizes.as_ptr(), attributes.as_ptr());
            let address = ready.managed + 8192;
            cuMemRangeGetAttributes(places.as_mut_ptr(), sizes, attributes, 2, address, 4096)
        };
        assert_eq!((asked, one, two), (0, 1, [-2, -2]));
    });
}

#[test]
fn advice_and_questions_that_make_no_sense_are_refused() {
    in_process(|| {
        let ready = ready();
        let (managed, device) = (ready.managed, ready.device);
        let mut value = [0_i32; 2];
        let place: *mut c_void = (&raw mut value).cast();
        // SAFETY: the places are writable for the sizes that are accepted.
        unsafe {
            for advice in [0, 7] {
                assert_eq!(
                    cuMemAdvise_v2(managed, BYTES, advice, DEVICE),
                    1,
                    "{advice}"
                );
            }
            assert_eq!(cuMemAdvise_v2(managed, 0, 1, DEVICE), 1);
            assert_eq!(cuMemAdvise_v2(managed, BYTES + 1, 1, DEVICE), 1);
            assert_eq!(cuMemAdvise_v2(device, BYTES, 1, DEVICE), 1);
            assert_eq!(cuMemAdvise_v2(managed, BYTES, 3, NO_DEVICE), 101);
            assert_eq!(cuMemAdvise_v2(managed, BYTES, 3, NOWHERE), 1);
            assert_eq!(cuMemAdvise(managed, BYTES, 3, 9), 101);
            assert_eq!(word(2, managed, BYTES), -2, "nothing was kept");
            for (bytes, attribute) in [(8, 1), (2, 1), (0, 3), (6, 3), (4, 0), (4, 9)] {
                let asked = cuMemRangeGetAttribute(place, bytes, attribute, managed, BYTES);
                assert_eq!(asked, 1, "{bytes} bytes of attribute {attribute}");
            }
            assert_eq!(cuMemRangeGetAttribute(place, 4, 1, device, BYTES), 1);
            assert_eq!(cuMemRangeGetAttribute(place, 4, 1, managed, 0), 1);
            assert_eq!(cuMemRangeGetAttribute(null_mut(), 4, 1, managed, BYTES), 1);
        }
    });
}

#[test]
fn a_prefetch_is_remembered() {
    in_process(|| {
        let ready = ready();
        let (managed, stream) = (ready.managed, ready.stream);
        let last = |bytes| [4, 7, 8].map(|attribute| word(attribute, managed, bytes));
        assert_eq!(last(BYTES), [-2, 0, -2]);
        // SAFETY: the stream is live, or known to be none.
        unsafe {
            assert_eq!(cuMemPrefetchAsync_v2(managed, BYTES, DEVICE, 0, stream), 0);
            assert_eq!(last(BYTES), [0, 1, 0]);
            assert_eq!(cuMemPrefetchAsync(managed, 4096, -1, stream), 0);
            assert_eq!(last(4096), [-1, 2, -1]);
            assert_eq!(last(BYTES), [-2, 0, -2]);
            assert_eq!(cuMemPrefetchAsync_v2(managed, 0, DEVICE, 0, stream), 1);
            assert_eq!(cuMemPrefetchAsync_v2(managed, BYTES, DEVICE, 1, stream), 1);
            assert_eq!(
                cuMemPrefetchAsync_v2(managed, BYTES, NO_DEVICE, 0, stream),
                101
            );
            assert_eq!(cuMemPrefetchAsync_v2(managed, BYTES, NOWHERE, 0, stream), 1);
            assert_eq!(cuMemPrefetchAsync_v2(managed, BYTES, NO_NODE, 0, stream), 1);
            assert_eq!(cuMemPrefetchAsync(ready.device, BYTES, 0, stream), 1);
            let no_stream = std::ptr::without_provenance_mut(0x1234_5670);
            assert_eq!(cuMemPrefetchAsync(managed, BYTES, 0, no_stream), 400);
        }
    });
}

#[test]
fn a_batch_names_a_place_for_each_range() {
    in_process(|| {
        let ready = ready();
        let stream = ready.stream;
        let addresses = [0, 4096, 8192].map(|offset| ready.managed + offset);
        let sizes = [4096_usize; 3];
        let batch = |locations: &[CUmemLocation], indices: &[usize], count, flags| {
            let (first, bytes) = (addresses.as_ptr(), sizes.as_ptr());
            let (places, from, number) = (locations.as_ptr(), indices.as_ptr(), locations.len());
            // SAFETY: the arrays have that many elements.
            unsafe {
                cuMemPrefetchBatchAsync(first, bytes, count, places, from, number, flags, stream)
            }
        };
        let last = || addresses.map(|address| word(4, address, 4096));
        assert_eq!(batch(&[DEVICE, HOST], &[0, 2], 3, 0), 0);
        assert_eq!(last(), [0, 0, -1]);
        for (locations, indices, count, flags) in [
            (&[HOST, DEVICE][..], &[1, 2][..], 3, 0),
            (&[HOST, DEVICE], &[0, 0], 3, 0),
            (&[HOST, DEVICE], &[0, 3], 3, 0),
            (&[HOST], &[0], 0, 0),
            (&[HOST], &[0], 3, 1),
            (&[], &[], 3, 0),
        ] {
            assert_eq!(
                batch(locations, indices, count, flags),
                1,
                "{indices:?} of {count}"
            );
        }
        assert_eq!(batch(&[HOST, NO_DEVICE], &[0, 1], 3, 0), 101);
        assert_eq!(last(), [0, 0, -1], "what is refused does nothing");
        let (first, bytes) = (addresses.as_ptr(), sizes.as_ptr());
        // SAFETY: the arrays have that many elements.
        unsafe {
            assert_eq!(cuMemDiscardBatchAsync(first, bytes, 3, 0, stream), 0);
            assert_eq!(cuMemDiscardBatchAsync(first, bytes, 0, 0, stream), 1);
            assert_eq!(cuMemDiscardBatchAsync(first, bytes, 3, 1, stream), 1);
            assert_eq!(
                cuMemDiscardBatchAsync(&raw const ready.device, bytes, 1, 0, stream),
                1
            );
            let (place, zero) = (&HOST, &sizes[0]);
            let discard = cuMemDiscardAndPrefetchBatchAsync;
            assert_eq!(
                discard(first, bytes, 3, place, zero, 1, 0, stream),
                1,
                "not from the first"
            );
            let zero = &0_usize;
            assert_eq!(discard(first, bytes, 3, place, zero, 1, 0, stream), 0);
        }
        assert_eq!(last(), [-1; 3]);
    });
}

#[test]
fn whole_allocations_are_attached() {
    in_process(|| {
        let ready = ready();
        let attach = |stream, address, length, flags| {
            // SAFETY: the stream is live or the legacy one.
            unsafe { cuStreamAttachMemAsync(stream, address, length, flags) }
        };
        let (stream, managed) = (ready.stream, ready.managed);
        for flags in [1, 2, 4] {
            assert_eq!(attach(stream, managed, 0, flags), 0);
            assert_eq!(attach(stream, managed, BYTES, flags), 0);
        }
        assert_eq!(attach(null_mut(), managed, 0, 1), 0);
        assert_eq!(
            attach(null_mut(), managed, 0, 4),
            1,
            "one stream that is all of them"
        );
        for flags in [0, 3, 8] {
            assert_eq!(attach(stream, managed, 0, flags), 1);
        }
        assert_eq!(attach(stream, managed, 4096, 4), 1);
        assert_eq!(attach(stream, managed + 16, 0, 4), 1);
        assert_eq!(attach(stream, ready.device, 0, 4), 1);
    });
}

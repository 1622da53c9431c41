//! When the library asks for text that kernels have printed.

mod support;

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cuda as _;
use support::calls::cuLaunchKernel;
use support::{Backend, in_process};
use wormhole_api::constants::image_flags::{ANY_KERNEL_PRINTS, USES_OUTPUT};

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuStreamCreate(stream: *mut Pointer, flags: u32) -> u32;
    fn cuStreamSynchronize(stream: Pointer) -> u32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> u32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemcpyDtoH_v2(destination: Pointer, source: u64, bytes: usize) -> u32;
}

const ASSERT: u32 = wormhole_api::CuResult::ASSERT.0;

/// Process with a kernel that prints, one that does not, and two streams.
struct Ready {
    backend: Backend,
    quiet: Pointer,
    talk: Pointer,
    streams: [Pointer; 2],
}

fn ready(image_flags: u32) -> Ready {
    let backend = Backend::start();
    let flags = &backend.shared.image_flags;
    flags.store(image_flags, Ordering::Release);
    let [mut context, mut module, mut quiet, mut talk] = [null_mut(); 4];
    let mut streams = [null_mut(); 2];
    // SAFETY: every place is writable, and the image is text that ends.
    let results = unsafe {
        [
            cuInit(0),
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            cuCtxSetCurrent(context),
            cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
            cuModuleGetFunction(&raw mut quiet, module, c"kernel".as_ptr()),
            cuModuleGetFunction(&raw mut talk, module, c"talk".as_ptr()),
            cuStreamCreate(&raw mut streams[0], 1),
            cuStreamCreate(&raw mut streams[1], 1),
        ]
    };
    assert_eq!(results, [0; 8]);
    Ready {
        backend,
        quiet,
        talk,
        streams,
    }
}

fn launch(function: Pointer, stream: Pointer) {
    let mut value = 7_u32;
    let mut parameters = [(&raw mut value).cast()];
    let parameters = parameters.as_mut_ptr();
    // SAFETY: the kernel is live and has one parameter of four bytes; the stream is live.
    let launched = unsafe {
        cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            parameters,
            null_mut(),
        )
    };
    assert_eq!(launched, 0);
}

fn synchronize(stream: Pointer) -> u32 {
    // SAFETY: the stream is live.
    unsafe { cuStreamSynchronize(stream) }
}

impl Ready {
    /// Returns how often a message was sent since the last call.
    fn sent(&self, name: &str) -> usize {
        let sent = self.backend.shared.take();
        sent.iter().filter(|sent| *sent == name).count()
    }

    /// Returns how many synchronizations were requests since the last call.
    fn asked(&self) -> usize {
        self.sent("Synchronize?")
    }
}

#[test]
fn only_work_of_kernels_that_print_makes_a_synchronization_a_request() {
    in_process(|| {
        let ready = ready(USES_OUTPUT);
        let Ready { quiet, talk, .. } = ready;
        let [stream, other] = ready.streams;
        launch(quiet, stream);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(ready.asked(), 0, "the kernel cannot print");
        launch(talk, stream);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(ready.asked(), 1);
        launch(quiet, stream);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(ready.asked(), 0, "its text was fetched");
        // A synchronization of another stream shows the text so far, but the kernel may print more.
        launch(talk, stream);
        assert_eq!([other, stream, stream].map(synchronize), [0; 3]);
        assert_eq!(ready.asked(), 2);
        for stream in ready.streams {
            launch(talk, stream);
        }
        // SAFETY: plain calls, and a copy from memory of the device to a word.
        unsafe {
            assert_eq!([cuCtxSynchronize(), cuCtxSynchronize()], [0; 2]);
            assert_eq!(ready.asked(), 1);
            let (mut memory, mut word) = (0, 0_u32);
            assert_eq!(cuMemAlloc_v2(&raw mut memory, 4), 0);
            launch(talk, null_mut());
            assert_eq!(cuMemcpyDtoH_v2((&raw mut word).cast(), memory, 4), 0);
        }
        assert_eq!(ready.asked(), 1, "a copy that waits shows text");
        assert_eq!(synchronize(null_mut()), 0);
        assert_eq!(ready.asked(), 0);
    });
}

#[test]
fn where_any_kernel_may_print_every_synchronization_is_a_request() {
    in_process(|| {
        let ready = ready(USES_OUTPUT | ANY_KERNEL_PRINTS);
        launch(ready.quiet, ready.streams[0]);
        assert_eq!([ready.streams[0]; 2].map(synchronize), [0; 2]);
        assert_eq!(ready.asked(), 2);
    });
}

#[test]
fn the_text_of_a_dead_context_is_fetched_once() {
    for (flags, asked) in [(0, 0), (USES_OUTPUT, 1)] {
        in_process(move || {
            let ready = ready(flags);
            let stream = ready.streams[0];
            // The first launch is a request, which this backend does not let fail.
            launch(ready.quiet, stream);
            let fails = &ready.backend.shared.fails_launches;
            fails.store(ASSERT, Ordering::Release);
            launch(ready.quiet, stream);
            assert_eq!([stream; 2].map(synchronize), [ASSERT; 2]);
            assert_eq!(ready.sent("TakeOutput?"), asked, "flags {flags}");
        });
    }
}

//! A device fault: no fence behind it is written, and every waiter gets the error.

use wormhole_api::{
    DevicePtr, Fence, FenceWrite, Function, Handle, Items, LaunchKernel, MemAlloc, MemAllocReply,
    MemCopy, Module, ModuleGetFunction, ModuleGetFunctionReply, Stream, StreamCreate, Synchronize,
    TakeOutput,
};
use wormhole_backend_tests::backend::{Backend, wait_until};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_backend_tests::messages::module_load;
use wormhole_ring::control::Refusal;
use wormhole_ring::fence::FenceIndex;

const PTX: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .entry fault()
{
    trap;
    ret;
}
.visible .entry store(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
";

fn load(guest: &mut Guest) -> Handle<Module> {
    guest.arena[0].write(0, PTX.as_bytes());
    let module = guest.mint();
    let answer = guest.call(&module_load(
        module,
        DevicePtr(guest.arena[0].address),
        PTX.len() as u64,
    ));
    assert_eq!(answer.status, 0);
    module
}

fn find(guest: &mut Guest, module: Handle<Module>, name: &[u8]) -> Handle<Function> {
    let function = guest.mint();
    let answer = guest.call(&ModuleGetFunction {
        module,
        new: function,
        name,
    });
    assert_eq!(answer.status, 0);
    let reply = answer.reply::<ModuleGetFunctionReply<'_>>();
    let parameters = usize::from(name == b"store");
    assert_eq!(reply.parameters.len(), parameters);
    function
}

fn launch(
    function: Handle<Function>,
    stream: Handle<Stream>,
    parameters: &[u8],
) -> LaunchKernel<'_> {
    LaunchKernel {
        function,
        stream,
        grid: [1, 1, 1],
        block: [32, 1, 1],
        shared: 0,
        attributes: Items::new(&[]),
        parameters,
    }
}

#[test]
fn a_kernel_runs_and_its_fence_follows_it() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let module = load(&mut guest);
    let store = find(&mut guest, module, b"store");
    let answer = guest.call(&MemAlloc { bytes: 128 });
    let device = answer.reply::<MemAllocReply>().address;
    let stream = guest.mint();
    guest.record(&StreamCreate {
        new: stream,
        flags: 1,
        priority: 0,
    });
    guest.record(&launch(store, stream, &device.0.to_le_bytes()));
    guest.record(&MemCopy {
        destination: DevicePtr(guest.arena[0].address + 4096),
        source: device,
        bytes: 128,
        stream,
    });
    guest.record(&FenceWrite {
        stream,
        fence: Fence::new(1).unwrap(),
        value: 5,
    });
    guest.wait_for_fence(1, 5);
    let expected: Vec<u8> = (0..32u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(guest.arena[0].read(4096, 128), expected);
}

#[test]
fn a_fault_denies_arena_and_the_worker_lives() {
    let mut backend = Backend::with_window(4096);
    let mut guest = backend.connect().open();
    let module = load(&mut guest);
    let fault = find(&mut guest, module, b"fault");
    // No fence and no answer follow it, so nothing makes the worker check for the fault.
    guest.record(&launch(fault, Handle::LEGACY, &[]));
    backend.wait_for_log("a kernel faulted");
    // The line is logged just before the context dies.
    let denied = (1..4000)
        .find_map(|id| match guest.request_arena(id, 1) {
            Reply::ArenaGrant(_) => None,
            Reply::ArenaDenied(_, code) => Some(code),
            other => panic!("{other:?}"),
        })
        .expect("the fault comes before the arena is used up");
    assert_eq!(denied, Refusal::NoDevice as u32);
    let cause = guest.status.load().expect("said before the answer");
    assert_eq!((cause.result, cause.cause), (719, 1));
    // Text can still be fetched from the worker.
    let sequence = guest.start(0, &TakeOutput {});
    let slot = wormhole_ring::slot::SlotIndex::new(0).unwrap();
    wait_until(
        || guest.slots.poll(slot, sequence).unwrap().is_some(),
        || "the answer of a dead context".into(),
    );
}

#[test]
fn a_fault_answers_every_request_and_no_fence_behind_it_is_written() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let mut guest = backend.connect().open();
    let module = load(&mut guest);
    let fault = find(&mut guest, module, b"fault");
    let stream = guest.mint();
    guest.record(&StreamCreate {
        new: stream,
        flags: 1,
        priority: 0,
    });
    guest.record(&launch(fault, stream, &[]));
    let synchronize = Synchronize {
        stream: Some(stream),
    };
    let asked: Vec<(u16, u64)> = (1..5)
        .map(|slot| (slot, guest.start(slot, &synchronize)))
        .collect();
    for index in 0..4 {
        guest.record(&FenceWrite {
            stream,
            fence: Fence::new(index).unwrap(),
            value: 1,
        });
    }
    let detected = guest.wait_for_status();
    assert_eq!((detected.result, detected.cause), (719, 1));
    for (slot, sequence) in asked {
        // The error is in the answer or in the status word.
        let result = match guest.wait(slot, sequence) {
            Ok(answer) => answer.status,
            Err(cause) => cause.result,
        };
        assert_eq!(result, 719);
    }
    for index in 0..4 {
        let fence = FenceIndex::new(index).unwrap();
        assert_eq!(guest.fences.load(fence), 0, "a fence behind a fault");
    }
    // Text can still be fetched from a dead context; calls return the error.
    let sequence = guest.start(0, &TakeOutput {});
    let slot = wormhole_ring::slot::SlotIndex::new(0).unwrap();
    wait_until(
        || guest.slots.poll(slot, sequence).unwrap().is_some(),
        || "the answer of a dead context".into(),
    );
    let taken = guest.slots.poll(slot, sequence).unwrap().unwrap();
    assert_eq!(taken.status, 0);
    // The neighbouring session still computes.
    let module = load(&mut neighbour);
    let store = find(&mut neighbour, module, b"store");
    let answer = neighbour.call(&MemAlloc { bytes: 128 });
    let device = answer.reply::<MemAllocReply>().address;
    neighbour.record(&launch(store, Handle::LEGACY, &device.0.to_le_bytes()));
    assert_eq!(neighbour.call(&Synchronize { stream: None }).status, 0);
}

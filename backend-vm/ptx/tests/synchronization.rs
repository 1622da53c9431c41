//! Asynchronous copies, barriers in shared memory, clusters of one block and progress of threads.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::Device;
use common::eval::{eval, words};
use wormhole_ptx::{FaultKind, LaunchConfig};

fn asynchronous() -> Device {
    Device::of("asynchronous")
}

#[test]
fn barriers_wait_for_copies() {
    for kernel in ["by_element", "by_block", "by_group"] {
        let device = asynchronous();
        let values: Vec<i32> = (0..1024).collect();
        let data = device.memory.upload(&values);
        device.launch(kernel, 4, 256, &[data]).unwrap();
        let expected: Vec<i32> = (0..1024).map(|i| i / 256 * 256 + 255 - i % 256).collect();
        assert_eq!(device.memory.read::<i32>(data, 1024), expected, "{kernel}");
    }
}

#[test]
fn stages_of_a_pipeline_follow_each_other() {
    let device = asynchronous();
    let values: Vec<i32> = (0..512).map(|i| i * 3).collect();
    let (input, out) = (device.memory.upload(&values), device.memory.alloc(512));
    device.launch("staged", 1, 128, &[input, out]).unwrap();
    let expected: Vec<i32> = (0..128)
        .map(|i| (0..4).map(|tile| values[tile * 128 + (i ^ 1)]).sum())
        .collect();
    assert_eq!(device.memory.read::<i32>(out, 128), expected);
}

#[test]
fn threads_of_one_warp_and_of_two_hand_over_values() {
    let device = asynchronous();
    let out = device.memory.alloc(8);
    device.launch("handed_over", 2, 64, &[out]).unwrap();
    let sum: i32 = (0..20).map(|i| i * i).sum();
    assert_eq!(device.memory.read::<i32>(out, 2), [sum, sum]);
}

#[test]
fn lanes_that_wait_for_each_other_take_turns() {
    let device = asynchronous();
    let (flag, out) = (device.memory.alloc(4), device.memory.alloc(4 * 192));
    device.launch("turns", 1, 64, &[flag, out]).unwrap();
    let expected: Vec<i32> = (0..192).map(|i| 63 - i % 64).collect();
    assert_eq!(device.memory.read::<i32>(out, 192), expected);
}

#[test]
fn a_cluster_is_one_block() {
    let device = asynchronous();
    let out = device.memory.alloc(4 * 96);
    device.launch("clusters", 1, 96, &[out]).unwrap();
    assert_eq!(device.memory.read::<i32>(out, 96), [41; 96]);
}

#[test]
fn atomics_of_16_bytes_and_of_vectors() {
    let device = asynchronous();
    let (cell, sums) = (device.memory.alloc(16), device.memory.alloc(32));
    let config = LaunchConfig {
        grid: [5, 1, 1],
        block: [64, 1, 1],
        threads: 2,
        ..LaunchConfig::default()
    };
    device
        .launch_with("wide_atomics", config, &[cell, sums])
        .unwrap();
    let n = 5 * 64_u64;
    assert_eq!(device.memory.read::<u64>(cell, 2), [n, n * (n - 1) / 2]);
    let expected = [320.0, 640.0, 960.0, 5.0 * 2016.0, 160.0, 80.0, 0.0, 0.0];
    assert_eq!(device.memory.read::<f32>(sums, 8), expected);
    let misaligned = device
        .launch("wide_atomics", 1, 1, &[cell, sums + 4])
        .unwrap_err();
    assert!(matches!(misaligned.kind, FaultKind::Misaligned { .. }));
}

/// Checks a word and the flag beside it, as programs send them from one processor to another.
#[test]
fn eight_bytes_of_a_vector_are_read_and_written_at_once() {
    const ROUNDS: u32 = 100_000;
    for (ty, last, pairs) in [
        ("v2.u32", u32::MAX, &["%r1, %r2"][..]),
        ("v4.u32", u32::MAX, &["%r1, %r2", "%r3, %r4"]),
        ("v4.u16", 0xFFFF, &["%r1, %r2", "%r1, %r3", "%r1, %r4"]),
        ("v2.u16", 0xFFFF, &["%r1, %r2"]),
        ("v4.u8", 0xFF, &["%r1, %r2", "%r1, %r3", "%r1, %r4"]),
    ] {
        let count = if ty.starts_with("v2") { 2 } else { 4 };
        let list = ["%r1", "%r2", "%r3", "%r4"][..count].join(", ");
        let value = ["%r5"; 4][..count].join(", ");
        let equal: String = pairs
            .iter()
            .map(|pair| format!("setp.ne.u32 %p1, {pair}; @%p1 trap; "))
            .collect();
        // The writer waits for the reader, which polls until it reads the last value.
        let text = format!(
            ".version 8.7\n.target sm_90\n.address_size 64
             .visible .entry writer(.param .u64 place) {{
             .reg .pred %p<2>; .reg .b32 %r<7>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [place]; mov.u32 %r6, 0;
             WAIT: ld.volatile.global.u32 %r5, [%rd1+64]; setp.eq.u32 %p1, %r5, 0; @%p1 bra WAIT;
             WRITE: add.u32 %r6, %r6, 1; and.b32 %r5, %r6, {last}; st.volatile.global.{ty} [%rd1], {{{value}}};
             setp.lt.u32 %p1, %r6, {ROUNDS}; @%p1 bra WRITE;
             mov.u32 %r5, {last}; st.volatile.global.{ty} [%rd1], {{{value}}}; ret; }}
             .visible .entry reader(.param .u64 place) {{
             .reg .pred %p<2>; .reg .b32 %r<7>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [place];
             st.volatile.global.u32 [%rd1+64], 1;
             LOOK: ld.volatile.global.{ty} {{{list}}}, [%rd1]; {equal}
             setp.ne.u32 %p1, %r1, {last}; @%p1 bra LOOK; ret; }}"
        );
        let device = Device::load(text.as_bytes());
        let place = device.memory.upload(&[0_u64; 9]);
        // Either stops waiting if the other failed.
        let failed = AtomicBool::new(false);
        let run = |name| {
            let config = LaunchConfig {
                cancel: Some(&failed),
                ..LaunchConfig::default()
            };
            let result = device.launch_with(name, config, &[place]);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        };
        let (writer, reader) = std::thread::scope(|scope| {
            let writer = scope.spawn(|| run("writer"));
            let reader = run("reader");
            (writer.join().unwrap(), reader)
        });
        reader.unwrap();
        writer.unwrap();
    }
}

#[test]
fn barriers_count_arrivals_and_bytes() {
    let init = "mbarrier.init.shared.b64 [s], 2;";
    let finish =
        "selp.u64 %out, 1, 0, %p1; @%p2 add.u64 %out, %out, 2; @%p3 add.u64 %out, %out, 4;";
    let arrivals = format!(
        "{init} mbarrier.arrive.shared.b64 %rd10, [s]; mbarrier.test_wait.shared.b64 %p1, [s], %rd10;
         mbarrier.arrive.shared.b64 _, [s]; mbarrier.test_wait.shared.b64 %p2, [s], %rd10;
         mbarrier.test_wait.parity.shared.b64 %p3, [s], 1; {finish}"
    );
    assert_eq!(eval(&arrivals, &[]), 2);
    let bytes = format!(
        "{init} mbarrier.arrive.expect_tx.shared.b64 _, [s], 48; mbarrier.arrive.shared.b64 _, [s];
         mbarrier.test_wait.parity.shared.b64 %p1, [s], 0; mbarrier.complete_tx.shared.b64 [s], 32;
         mbarrier.test_wait.parity.shared.b64 %p2, [s], 0; mbarrier.complete_tx.shared.b64 [s], 16;
         mbarrier.test_wait.parity.shared.b64 %p3, [s], 0; {finish}"
    );
    assert_eq!(eval(&bytes, &[]), 4);
    // A dropped thread is not expected in the next phase, either.
    let dropped = format!(
        "{init} mbarrier.arrive_drop.shared.b64 _, [s]; mbarrier.arrive.shared.b64 _, [s];
         mbarrier.arrive.shared.b64 %rd10, [s]; mbarrier.test_wait.shared.b64 %p1, [s], %rd10;
         mbarrier.pending_count.b64 %r10, %rd10; setp.eq.u32 %p2, %r10, 1; setp.ne.u32 %p3, 0, 0; {finish}"
    );
    assert_eq!(eval(&dropped, &[]), 3);
    let generic = "mov.u64 %rd10, s; cvta.shared.u64 %rd10, %rd10; mbarrier.init.b64 [%rd10], 1;
                   mbarrier.arrive.b64 %rd11, [%rd10]; mbarrier.try_wait.b64 %p1, [%rd10], %rd11, 1000;
                   mbarrier.inval.b64 [%rd10]; selp.u64 %out, 1, 0, %p1;";
    assert_eq!(eval(generic, &[]), 1);
}

#[test]
fn bulk_copies_complete_their_barrier() {
    let body = "mbarrier.init.shared.b64 [s+32], 1; st.global.v2.u64 [g], {%rd0, %rd1};
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [g], 16, [s+32];
         mbarrier.arrive.expect_tx.shared.b64 %rd10, [s+32], 16;
         mbarrier.try_wait.shared.b64 %p1, [s+32], %rd10; ld.shared.u64 %rd11, [s+8];
         st.shared.u64 [s], 1000; cp.async.bulk.global.shared::cta.bulk_group [g+16], [s], 16;
         cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; ld.global.u64 %rd12, [g+16];
         add.u64 %out, %rd11, %rd12; @%p1 add.u64 %out, %out, 1;";
    assert_eq!(eval(body, &[5, 70]), 1071);
    let ignored = "st.global.u64 [g], 7; st.shared.u64 [s], 9; setp.eq.u32 %p1, %r0, 1;
         cp.async.ca.shared.global [s], [g], 8, %p1; cp.async.wait_all; ld.shared.u64 %out, [s];";
    assert_eq!((eval(ignored, &[0]), eval(ignored, &[1])), (7, 0));
}

#[test]
fn registers_of_128_bits() {
    let body =
        ".reg .b128 %q<3>; mov.b128 %q0, {%rd0, %rd1}; mov.b128 %q1, %q0; st.global.b128 [g], %q1;
         mov.b128 %q2, {%rd1, %rd0}; atom.global.exch.b128 %q0, [g], %q2; ld.global.b128 %q1, [g];
         mov.b128 {%rd10, %rd11}, %q0; mov.b128 {%rd12, %rd13}, %q1; st.shared.b128 [s], %q1;
         atom.shared.cas.b128 %q2, [s], %q1, %q0; ld.shared.u64 %rd14, [s];
         mad.lo.u64 %out, %rd10, 10, %rd11; mad.lo.u64 %out, %out, 10, %rd12;
         mad.lo.u64 %out, %out, 10, %rd13; mad.lo.u64 %out, %out, 10, %rd14;";
    assert_eq!(eval(body, &[3, 8]), 38833);
}

#[test]
fn atomics_of_halves() {
    let atom = |op: &str, old: u64, a: u64| {
        let body = format!(
            "st.global.u64 [g], %rd0; atom.global.{op}.v2.f16x2 {{%r10, %r11}}, [g], {{%r1, %r1}};
             ld.global.u64 %out, [g]; cvt.u64.u32 %rd10, %r11; shl.b64 %rd10, %rd10, 32;
             cvt.u64.u32 %rd11, %r10; or.b64 %rd10, %rd10, %rd11; setp.ne.u64 %p1, %rd10, %rd0; @%p1 trap;"
        );
        eval(&body, &[old, a])
    };
    assert_eq!(
        atom("add.noftz", 0x3c00_4000_0000_7c00, 0x4000_3c00),
        0x4200_4200_4000_7c00
    );
    assert_eq!(
        atom("min.noftz", 0x3c00_4000_7e00_0000, 0x3800_4400),
        0x3800_4000_3800_0000
    );
    assert_eq!(
        atom("max.noftz", 0x3c00_4000_7e00_8000, 0x3800_0000),
        0x3c00_4000_3800_0000
    );
    let scalar = "st.shared.u32 [s], %r0; atom.shared.add.noftz.bf16 %h10, [s], %h1; ld.shared.u16 %h11, [s];
                  red.shared.add.noftz.bf16 [s+2], %h1; ld.shared.u32 %r11, [s]; cvt.u64.u32 %out, %r11;";
    assert_eq!(eval(scalar, &[0x3f80_4000, 0x3f80]), 0x4000_4040);
}

#[test]
fn logic_with_a_predicate_and_older_forms() {
    let lop = "setp.eq.u32 %p1, %r2, 1; lop3.or.b32 %r10|%p2, %r0, %r1, 0, 0xc0, %p1;
               cvt.u64.u32 %out, %r10; @%p2 add.u64 %out, %out, 0x100000000;";
    assert_eq!(eval(lop, &[6, 3, 0]), 1 << 32 | 2);
    assert_eq!(eval(lop, &[4, 3, 0]), 0);
    assert_eq!(eval(lop, &[4, 3, 1]), 1 << 32);
    words("mov.u32 %r0, WARP_SZ; add.u32", &[1, 2], 34);
    let older =
        "shfl.idx.b32 %r10|%p1, %r0, 0, 31; vote.ballot.b32 %r11, %p1; vote.all.pred %p2, %p1;
                 add.u32 %r10, %r10, %r11; @%p2 add.u32 %r10, %r10, 100; cvt.u64.u32 %out, %r10;";
    assert_eq!(eval(older, &[5]), 106);
    let cluster = "mov.pred %p1, %is_explicit_cluster; selp.u64 %out, 1, 2, %p1;
                   mapa.shared::cluster.u32 %r10, %r0, 0; cvt.u64.u32 %rd10, %r10; add.u64 %out, %out, %rd10;
                   createpolicy.fractional.L2::evict_last.b64 %rd11, 1.0;
                   ld.global.L2::cache_hint.u32 %r11, [g], %rd11;";
    assert_eq!(eval(cluster, &[40]), 42);
}

/// Runs a kernel of PTX text, with the thread's number in `%r1` and 4 bytes of `%out` for each
/// thread.
fn threads(body: &str, count: u32) -> Vec<u32> {
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n
         .visible .entry k(.param .u64 out) {{ .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<3>, %out;
         .shared .align 4 .b8 s[1024];
         ld.param.u64 %out, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %out, %out, %rd1;
         shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r2, %r2, %r3; mov.u32 %r10, 0;
         {body} st.global.u32 [%out], %r10; ret; }}"
    );
    let device = Device::load(text.as_bytes());
    let out = device.memory.alloc(count as usize * 4);
    device.launch("k", 1, count, &[out]).unwrap();
    device.memory.read(out, count as usize)
}

#[test]
fn some_arrive_and_others_wait() {
    // Two warps fill memory and continue; the third waits for both.
    let body = "setp.ge.u32 %p1, %r1, 64; @%p1 bra WAIT;
         st.shared.u32 [%r2], %r1; bar.arrive 1, 96; mov.u32 %r10, 7; bra END;
         WAIT: bar.sync 1, 96; ld.shared.u32 %r10, [%r2+-256]; ld.shared.u32 %r11, [%r2+-128];
         add.u32 %r10, %r10, %r11; END:";
    let expected: Vec<u32> = (0..96)
        .map(|i| if i < 64 { 7 } else { (i - 64) + (i - 32) })
        .collect();
    assert_eq!(threads(body, 96), expected);
}

#[test]
fn barriers_reduce_over_the_threads_that_take_part() {
    let body = "setp.ge.u32 %p1, %r1, 64; @%p1 bra END; and.b32 %r4, %r1, 3; setp.eq.u32 %p2, %r4, 1;
         bar.red.popc.u32 %r10, 2, 64, %p2; barrier.red.and.pred %p3, 3, 64, %p2; bar.red.or.pred %p4, 2, 64, %p2;
         barrier.cta.red.and.aligned.pred %p5, 4, 64, !%p3;
         @%p3 add.u32 %r10, %r10, 100; @%p4 add.u32 %r10, %r10, 1000; @%p5 add.u32 %r10, %r10, 10000; END:";
    let expected: Vec<u32> = (0..96).map(|i| if i < 64 { 11016 } else { 0 }).collect();
    assert_eq!(threads(body, 96), expected);
}

#[test]
fn lanes_come_to_a_barrier_from_different_places() {
    let body = "and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 1; st.shared.u32 [%r2], %r1; @%p1 bra ODD;
         barrier.sync 0; xor.b32 %r5, %r1, 1; bra END;
         ODD: add.u32 %r10, %r10, 5; barrier.sync 0; xor.b32 %r5, %r1, 2;
         END: shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r3; ld.shared.u32 %r6, [%r5]; add.u32 %r10, %r10, %r6;";
    let expected: Vec<u32> = (0..64)
        .map(|i| if i % 2 == 1 { 5 + (i ^ 2) } else { i ^ 1 })
        .collect();
    assert_eq!(threads(body, 64), expected);
}

#[test]
fn ended_threads_are_not_waited_for() {
    let body = "setp.ge.u32 %p1, %r1, 40; @%p1 exit; bar.sync 0; vote.sync.ballot.b32 %r10, 1, -1;";
    let expected: Vec<u32> = (0..64)
        .map(|i| match i {
            0..32 => u32::MAX,
            32..40 => 0xff,
            _ => 0,
        })
        .collect();
    assert_eq!(threads(body, 64), expected);
}

/// Lanes of one warp pass a list in memory along, each waiting for the one before it.
#[test]
fn a_chain_of_lanes_in_one_warp() {
    let body =
        "st.volatile.shared.u32 [%r2], 0; bar.sync 0; setp.eq.u32 %p1, %r1, 63; @%p1 bra FIRST;
         LOOP: ld.volatile.shared.u32 %r10, [%r2+4]; setp.eq.u32 %p2, %r10, 0; @%p2 bra LOOP;
         FIRST: add.u32 %r10, %r10, 3; st.volatile.shared.u32 [%r2], %r10;";
    let expected: Vec<u32> = (0..64).map(|i| 3 * (64 - i)).collect();
    assert_eq!(threads(body, 64), expected);
}

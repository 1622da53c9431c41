//! The checker finds races and uninitialised reads, with their place, and reports nothing else.

mod common;

use common::Device;
use wormhole_ptx::LaunchConfig;

/// Returns the checker's findings for a kernel `k` of `threads` threads, whose body has shared memory `s` and a
/// pointer `%out`. The body begins on line 10.
fn findings_of(threads: u32, body: &str) -> Vec<String> {
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 out)\n{{\n\
         .shared .align 16 .b8 s[8192];\n\
         .reg .b32 %r<16>; .reg .b64 %rd<8>, %out; .reg .pred %p<4>; .reg .b32 %t, %n, %w;\n\
         ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; shl.b32 %r0, %t, 2; mov.u32 %w, s; add.u32 %r0, %r0, %w;\n\
         xor.b32 %n, %t, 1; shl.b32 %n, %n, 2; add.u32 %n, %n, %w;\n\
         {body}\nret;\n}}\n"
    );
    let device = Device::load(text.as_bytes());
    let out = device.memory.alloc(1 << 17);
    let config = LaunchConfig {
        grid: [2, 1, 1],
        block: [threads, 1, 1],
        check: true,
        ..LaunchConfig::default()
    };
    device.launch_with("k", config, &[out]).unwrap();
    device.output.text().lines().map(str::to_owned).collect()
}

fn is_clean(threads: u32, body: &str) {
    let found = findings_of(threads, body);
    assert!(found.is_empty(), "{body}\n{found:#?}");
}

/// Asserts that a finding begins with the word and names exactly these lines, and that no finding names others.
fn has(threads: u32, body: &str, word: &str, lines: &[u32]) {
    let found = findings_of(threads, body);
    let named = |finding: &str| {
        let mut named: Vec<u32> = finding
            .split("(line ")
            .skip(1)
            .map(|rest| rest[..rest.find(')').unwrap()].parse().unwrap())
            .collect();
        named.sort_unstable();
        named.dedup();
        named
    };
    let wanted = |finding: &String| finding.starts_with(word) && named(finding) == lines;
    assert!(found.iter().any(wanted), "{body}\n{found:#?}");
    let strays = |finding: &String| named(finding).iter().any(|line| !lines.contains(line));
    assert!(!found.iter().any(strays), "{body}\n{found:#?}");
}

#[test]
fn a_read_of_what_another_thread_wrote_needs_a_barrier() {
    let body = "st.shared.u32 [%r0], %t;\nld.shared.u32 %r1, [%n];";
    has(64, body, "race:", &[10, 11]);
    is_clean(
        64,
        "st.shared.u32 [%r0], %t;\nbar.sync 0;\nld.shared.u32 %r1, [%n];",
    );
    // Generic addresses and vectors access the same memory.
    let generic = "cvt.u64.u32 %rd1, %r0; cvta.shared.u64 %rd1, %rd1; st.u32 [%rd1], %t;
        and.b32 %r2, %n, -16; ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];";
    has(64, generic, "race:", &[10, 11]);
}

#[test]
fn a_finding_names_both_sides() {
    let body = "setp.ge.u32 %p1, %t, 2;\n@%p1 bra DONE;\n\
                st.shared.u32 [%r0], %t;\nld.shared.u32 %r1, [%n];\nDONE:";
    let found = findings_of(32, body);
    assert_eq!(
        found,
        [
            "race: kernel `k`, block [0, 0, 0]: thread [0, 0, 0] reads byte 0x4 of shared memory (line 13), \
          which thread [1, 0, 0] wrote (line 12); nothing orders the two"
        ]
    );
}

#[test]
fn a_write_after_a_read_needs_a_barrier_too() {
    let body =
        "st.shared.u32 [%r0], %t; bar.sync 0;\nld.shared.u32 %r1, [%n];\nst.shared.u32 [%r0], %r1;";
    has(64, body, "race:", &[11, 12]);
    is_clean(
        64,
        "st.shared.u32 [%r0], %t; bar.sync 0;\nld.shared.u32 %r1, [%n];\nbar.sync 0;\nst.shared.u32 [%r0], %r1;",
    );
}

#[test]
fn what_nobody_wrote_is_uninitialised() {
    has(32, "ld.shared.u32 %r1, [%r0];", "uninitialised:", &[10]);
    has(
        32,
        "st.shared.u16 [%r0], 1;\nld.shared.u32 %r1, [%r0];",
        "uninitialised:",
        &[11],
    );
    has(
        32,
        "atom.shared.add.u32 %r1, [%r0], 1;",
        "uninitialised:",
        &[10],
    );
    is_clean(
        32,
        "st.shared.u32 [%r0], 1;\natom.shared.add.u32 %r1, [%r0], 1;",
    );
}

#[test]
fn writes_of_the_same_value_are_no_race_and_others_are() {
    is_clean(64, "st.shared.u32 [s], 7;");
    has(64, "st.shared.u32 [s], %t;", "race:", &[10]);
}

#[test]
fn bytes_of_one_word_are_distinguished() {
    is_clean(
        64,
        "add.u32 %r1, %w, %t;\nst.shared.u8 [%r1], %t;\nld.shared.u8 %r2, [%r1];",
    );
}

#[test]
fn atomic_operations_do_not_race_with_one_another() {
    let count = "setp.eq.u32 %p1, %t, 0;\n@%p1 st.shared.u32 [s], 0;\nbar.sync 0;\nred.shared.add.u32 [s], 1;\n";
    is_clean(64, &format!("{count}bar.sync 0;\nld.shared.u32 %r1, [s];"));
    has(
        64,
        &format!("{count}ld.shared.u32 %r1, [s];"),
        "race:",
        &[13, 14],
    );
}

#[test]
fn a_lock_orders_what_it_guards() {
    let guarded = "TRY:\natom.global.cas.b32 %r1, [%out], 0, 1;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra TRY;\n\
                   membar.gl;\nst.shared.u32 [s], %t;\nld.shared.u32 %r2, [s];\nmembar.gl;\n\
                   atom.global.exch.b32 %r1, [%out], 0;";
    is_clean(64, guarded);
}

#[test]
fn barriers_with_counts_order_those_who_come() {
    // Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2. A read of the other pair's words is a race.
    let meet =
        "shr.u32 %r1, %t, 6; add.u32 %r1, %r1, 1;\nst.shared.u32 [%r0], %t;\nbar.sync %r1, 64;\n";
    let within = "xor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %w;\nld.shared.u32 %r3, [%r2];";
    let beyond = "xor.b32 %r2, %t, 64; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %w;\nld.shared.u32 %r3, [%r2];";
    is_clean(128, &format!("{meet}{within}"));
    has(128, &format!("{meet}{beyond}"), "race:", &[11, 14]);
}

#[test]
fn who_only_arrives_learns_nothing() {
    // Warp 0 produces and arrives, warp 1 waits and consumes.
    let both = "setp.lt.u32 %p1, %t, 32;\nxor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %w;\n\
                @!%p1 bra CONSUME;\nst.shared.u32 [%r0], %t;\nbar.arrive 1, 64;\n";
    is_clean(
        64,
        &format!("{both}bra DONE;\nCONSUME:\nbar.sync 1, 64;\nld.shared.u32 %r3, [%r2];\nDONE:"),
    );
    let backwards = format!(
        "{both}ld.shared.u32 %r3, [%r2];\nbra DONE;\nCONSUME:\nst.shared.u32 [%r0], %t;\nbar.sync 1, 64;\nDONE:"
    );
    has(64, &backwards, "race:", &[15, 18]);
}

#[test]
fn lanes_that_meet_are_ordered_and_warps_are_not() {
    for meeting in [
        "bar.warp.sync 0xffffffff;",
        "shfl.sync.bfly.b32 %r5, %t, 1, 31, 0xffffffff;",
        "vote.sync.ballot.b32 %r5, 1, 0xffffffff;",
    ] {
        let meeting = meeting.replace("ballot.b32 %r5, 1,", "ballot.b32 %r5, %p0,");
        is_clean(
            64,
            &format!("st.shared.u32 [%r0], %t;\n{meeting}\nld.shared.u32 %r1, [%n];"),
        );
        let beyond = format!(
            "st.shared.u32 [%r0], %t;\n{meeting}\nxor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %w;\n\
             ld.shared.u32 %r1, [%r2];"
        );
        has(64, &beyond, "race:", &[10, 13]);
    }
    // Lanes 0 to 15 meet without the others.
    let half = "st.shared.u32 [%r0], %t;\nsetp.ge.u32 %p1, %t, 16;\n@%p1 bra DONE;\nbar.warp.sync 0xffff;\n";
    is_clean(32, &format!("{half}ld.shared.u32 %r1, [%n];\nDONE:"));
    has(
        32,
        &format!("{half}ld.shared.u32 %r1, [%n+64];\nDONE:"),
        "race:",
        &[10, 14],
    );
}

#[test]
fn asynchronous_copies_are_there_when_they_were_waited_for() {
    let copy = "mul.wide.u32 %rd1, %t, 4; add.s64 %rd1, %rd1, %out;\n\
                cp.async.ca.shared.global [%r0], [%rd1], 4;\ncp.async.commit_group;\n";
    has(
        64,
        &format!("{copy}ld.shared.u32 %r1, [%r0];"),
        "race:",
        &[11, 13],
    );
    is_clean(
        64,
        &format!("{copy}cp.async.wait_group 0;\nld.shared.u32 %r1, [%r0];"),
    );
    is_clean(
        64,
        &format!("{copy}cp.async.wait_all;\nld.shared.u32 %r1, [%r0];"),
    );
    has(
        64,
        &format!("{copy}cp.async.wait_group 1;\nld.shared.u32 %r1, [%r0];"),
        "race:",
        &[11, 14],
    );
    has(
        64,
        &format!("{copy}cp.async.wait_group 0;\nld.shared.u32 %r1, [%n];"),
        "race:",
        &[11, 14],
    );
    is_clean(
        64,
        &format!("{copy}cp.async.wait_group 0;\nbar.sync 0;\nld.shared.u32 %r1, [%n];"),
    );
    // Without the wait, a barrier orders nothing.
    has(
        64,
        &format!("{copy}bar.sync 0;\nld.shared.u32 %r1, [%n];"),
        "race:",
        &[11, 14],
    );
}

#[test]
fn a_phase_of_an_mbarrier_orders_its_arrivals_before_its_tests() {
    let begin = "setp.eq.u32 %p1, %t, 0;\n@%p1 mbarrier.init.shared.b64 [s+4096], 64;\nbar.sync 0;\n\
                 st.shared.u32 [%r0], %t;\nmbarrier.arrive.shared.b64 %rd1, [s+4096];\n";
    let wait = "WAIT:\nmbarrier.test_wait.shared.b64 %p2, [s+4096], %rd1;\n@!%p2 bra WAIT;\n";
    is_clean(64, &format!("{begin}{wait}ld.shared.u32 %r1, [%n];"));
    has(
        64,
        &format!("{begin}ld.shared.u32 %r1, [%n];"),
        "race:",
        &[13, 15],
    );
    // A use of the barrier before its initialisation is a race as well.
    let early = "setp.eq.u32 %p1, %t, 0;\n@%p1 mbarrier.init.shared.b64 [s+4096], 64;\n\
                 mbarrier.arrive.shared.b64 %rd1, [s+4096];";
    let found = findings_of(64, early);
    assert!(
        found.iter().any(|finding| finding.starts_with("race:")),
        "{found:#?}"
    );
}

#[test]
fn copies_that_arrive_at_an_mbarrier_are_there_in_its_next_phase() {
    let body = "setp.eq.u32 %p1, %t, 0;\n@%p1 mbarrier.init.shared.b64 [s+4096], 64;\nbar.sync 0;\n\
                mul.wide.u32 %rd1, %t, 4; add.s64 %rd1, %rd1, %out;\n\
                cp.async.ca.shared.global [%r0], [%rd1], 4;\n\
                cp.async.mbarrier.arrive.noinc.shared.b64 [s+4096];\n";
    let wait = "WAIT:\nmbarrier.test_wait.parity.shared.b64 %p2, [s+4096], 0;\n@!%p2 bra WAIT;\n";
    is_clean(64, &format!("{body}{wait}ld.shared.u32 %r1, [%n];"));
    has(
        64,
        &format!("{body}ld.shared.u32 %r1, [%n];"),
        "race:",
        &[14, 16],
    );
}

#[test]
fn nothing_is_reported_unless_asked() {
    let device = Device::load(
        b".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k() {
          .shared .b32 s; .reg .b32 %r; mov.u32 %r, %tid.x; st.shared.u32 [s], %r; ret; }",
    );
    device.launch("k", 1, 64, &[]).unwrap();
    assert_eq!(device.output.text(), "");
}

/// The checker's state for a kernel is bounded; beyond the bound it reports no false findings.
#[test]
fn more_atomic_addresses_and_copies_than_are_distinguished_make_no_finding() {
    is_clean(
        64,
        "mov.u32 %r5, 0;
        mad.wide.u32 %rd1, %t, 4, %out;
        AGAIN: red.global.add.u32 [%rd1], 1; add.u64 %rd1, %rd1, 256; add.u32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, 400; @%p1 bra AGAIN;
        setp.lt.u32 %p1, %t, 32; @!%p1 bra TAKE;
        st.shared.u32 [%r0], %t; bar.warp.sync -1;
        setp.eq.u32 %p2, %t, 0; @%p2 st.release.gpu.global.u32 [%out+110000], 1; bra DONE;
        TAKE: ld.acquire.gpu.global.u32 %r6, [%out+110000];
        setp.eq.u32 %p3, %r6, 0; @%p3 bra TAKE;
        ld.shared.u32 %r7, [%r0+-128];
        DONE:",
    );
    is_clean(
        32,
        "mov.u32 %r5, 0;
        AGAIN: cp.async.ca.shared.global [%r0], [%out], 4; cp.async.commit_group; add.u32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, 1000; @%p1 bra AGAIN;
        cp.async.wait_group 0;
        ld.shared.u32 %r7, [%r0];",
    );
}

//! Links several texts, objects and libraries into one module.

mod common;

use common::Device;
use wormhole_ptx::image::{members, of_object};
use wormhole_ptx::link::{Input, LinkError, link};
use wormhole_ptx::{LaunchConfig, LoadError, Module};

const HEAD: &str = ".version 8.0\n.target sm_70\n.address_size 64\n";
/// `call` stores `give(n)` for each thread n.
const CALLS: &str = ".extern .func (.param .b32 r) give(.param .b32 x);
.visible .entry call(.param .u64 out) {
.reg .b32 %r<4>; .reg .b64 %rd<3>;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r1; call.uni (q), give, (p); ld.param.b32 %r2, [q]; }
st.global.u32 [%rd1], %r2; ret; }
";

fn text(body: &str) -> String {
    format!("{HEAD}{body}")
}

/// Returns a text in which `give` adds a number.
fn give(linkage: &str, number: u32) -> String {
    text(&format!(
        "{linkage} .func (.param .b32 r) give(.param .b32 x) {{
.reg .b32 %r<3>;
ld.param.b32 %r1, [x]; add.u32 %r2, %r1, {number}; st.param.b32 [r], %r2; ret; }}\n"
    ))
}

fn inputs<'a>(texts: &'a [&'a str]) -> Vec<Input<'a>> {
    const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];
    texts
        .iter()
        .zip(NAMES)
        .map(|(text, name)| Input {
            name,
            text,
            of_library: false,
        })
        .collect()
}

fn linked(texts: &[&str]) -> Result<Device, LinkError> {
    link(&inputs(texts)).map(|text| Device::load(text.as_bytes()))
}

fn run(device: &Device, kernel: &str) -> Vec<u32> {
    let out = device.memory.alloc(16);
    device.launch(kernel, 1, 4, &[out]).unwrap();
    device.memory.read(out, 4)
}

#[test]
fn a_declared_function_is_found_in_another_text_of_either_order() {
    let (calls, gives) = (text(CALLS), give(".visible", 10));
    for texts in [[&*calls, &*gives], [&*gives, &*calls]] {
        assert_eq!(
            run(&linked(&texts).unwrap(), "call"),
            [10, 11, 12, 13],
            "{texts:?}"
        );
    }
}

#[test]
fn the_newest_version_and_target_are_kept() {
    let newer =
        ".version 8.4\n.target sm_90a, debug\n.address_size 64\n.visible .entry k() { ret; }\n";
    let text = link(&inputs(&[&text(""), newer])).unwrap();
    let module = Module::from_ptx(&text).unwrap();
    assert_eq!(module.ptx_version(), (8, 4));
    assert_eq!(module.target(), "sm_90a");
}

#[test]
fn a_strong_definition_wins_and_of_weak_ones_the_first() {
    let calls = text(CALLS);
    let (one, two) = (give(".weak", 10), give(".weak", 20));
    let strong = give(".visible", 30);
    let value = |texts: &[&str]| run(&linked(texts).unwrap(), "call")[0];
    assert_eq!(value(&[&calls, &one, &two]), 10);
    assert_eq!(value(&[&calls, &two, &one]), 20);
    assert_eq!(value(&[&calls, &one, &strong]), 30);
    assert_eq!(value(&[&strong, &two, &calls]), 30);
}

#[test]
fn variables_are_shared_and_the_largest_common_one_stays() {
    let reader = |kernel: &str, name: &str, declaration: &str| {
        text(&format!(
            "{declaration}\n.visible .entry {kernel}(.param .u64 out) {{
.reg .b32 %r<2>; .reg .b64 %rd<2>;
ld.param.u64 %rd1, [out]; ld.global.u32 %r1, [{name}]; st.global.u32 [%rd1], %r1; ret; }}\n"
        ))
    };
    let first = reader("a", "one", ".extern .global .align 4 .u32 one;");
    let second = text(
        ".global .u32 spare, other = 5;\n.visible .global .align 8 .u64 to = one;\n.visible .global .align 4 .u32 one = 42;",
    );
    let device = linked(&[&first, &second]).unwrap();
    assert_eq!(run(&device, "a")[0], 42);
    let (one, _) = device.program.variable("one").unwrap();
    let (to, _) = device.program.variable("to").unwrap();
    assert_eq!(
        device.memory.read::<u64>(to, 1),
        [one],
        "an address in an initialiser"
    );
    assert!(device.program.variable("spare").is_some());

    let small = reader("a", "shared", ".common .global .align 4 .b8 shared[4];");
    let large = reader("b", "shared", ".common .global .align 4 .b8 shared[64];");
    let device = linked(&[&small, &large]).unwrap();
    assert_eq!(device.program.variable("shared").unwrap().1, 64);
    let defined = text(".visible .global .align 4 .u32 shared = 9;");
    let device = linked(&[&small, &large, &defined]).unwrap();
    assert_eq!((run(&device, "a")[0], run(&device, "b")[0]), (9, 9));
}

#[test]
fn local_names_of_different_texts_stay_apart() {
    let part = |kernel: &str, value: u32| {
        text(&format!(
            ".global .align 4 .u32 hidden = {value};
.func (.param .b32 r) own() {{ .reg .b32 %r<2>; ld.global.u32 %r1, [hidden]; st.param.b32 [r], %r1; ret; }}
.visible .entry {kernel}(.param .u64 out) {{
.reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [out];
{{ .param .b32 q; call.uni (q), own, (); ld.param.b32 %r1, [q]; }} st.global.u32 [%rd1], %r1; ret; }}\n"
        ))
    };
    // A name that is local here and visible elsewhere names two variables, too.
    let visible = text(".visible .global .align 4 .u32 hidden = 3;");
    let device = linked(&[&part("a", 1), &part("b", 2), &visible]).unwrap();
    assert_eq!((run(&device, "a")[0], run(&device, "b")[0]), (1, 2));
    let (address, _) = device.program.variable("hidden").unwrap();
    assert_eq!(device.memory.read::<u32>(address, 1), [3]);
}

#[test]
fn dynamic_shared_memory_is_declared_by_everybody() {
    let part = |kernel: &str, align: u32| {
        text(&format!(
            ".extern .shared .align {align} .b8 space[];\n.visible .entry {kernel}() {{ .reg .b64 %rd<2>; mov.u64 %rd1, space; ret; }}\n"
        ))
    };
    let text = link(&inputs(&[&part("a", 4), &part("b", 16)])).unwrap();
    assert_eq!(text.matches(".extern .shared").count(), 1);
    assert!(text.contains(".align 16"), "the greatest alignment");
}

#[test]
fn what_nobody_defines_is_named() {
    let error = linked(&[&text(CALLS), &text("")]).err().unwrap();
    assert_eq!(
        error.to_string(),
        "Undefined reference to 'give' in 'first'"
    );
    let local = give("", 1);
    assert!(
        linked(&[&text(CALLS), &local]).is_err(),
        "a local one does not count"
    );
    // A declaration that is not used needs no definition, nor does a function that the device provides.
    let unused =
        text(".extern .func nobody;\n.extern .global .u32 nowhere;\n.visible .entry k() { ret; }");
    linked(&[&unused]).unwrap();
    let prints = text(
        ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n.visible .entry k() { .reg .b64 %rd<2>; { .param .b64 f; .param .b64 a; .param .b32 r; call.uni (r), vprintf, (f, a); } ret; }",
    );
    linked(&[&prints, &text("")]).unwrap();
}

#[test]
fn what_is_defined_twice_is_named() {
    let error = linked(&[&give(".visible", 1), &text(CALLS), &give(".visible", 2)]);
    assert_eq!(
        error.err().unwrap().to_string(),
        "Multiple definition of 'give' in 'third', first defined in 'first'"
    );
    let kernel = text(".entry k() { ret; }");
    assert!(matches!(
        linked(&[&kernel, &kernel]).err(),
        Some(LinkError::Duplicate { .. })
    ));
}

#[test]
fn a_function_is_no_variable() {
    let error = linked(&[&text(CALLS), &text(".visible .global .u32 give;")]).err();
    assert!(matches!(error, Some(LinkError::Kind { .. })), "{error:?}");
}

#[test]
fn a_text_that_is_no_ptx_is_named_with_its_line() {
    let error = linked(&[&text(CALLS), &text("nonsense")]).err().unwrap();
    assert!(error.to_string().starts_with("second: line 4: "), "{error}");
}

#[test]
fn of_a_library_only_what_is_missing_takes_part() {
    let (calls, gives) = (text(CALLS), give(".visible", 10));
    let broken = text(".extern .func lost;\n.visible .func unwanted() { call lost; ret; }");
    let texts = [&*calls, &broken, &gives, &gives];
    let mut list = inputs(&texts);
    for input in &mut list[1..] {
        input.of_library = true;
    }
    let device = Device::load(link(&list).unwrap().as_bytes());
    assert_eq!(run(&device, "call"), [10, 11, 12, 13]);
}

#[test]
fn a_function_is_called_as_it_is_declared_and_entered_as_it_is_defined() {
    // The caller passes two parameters and expects a result of eight bytes.
    let calls = text(
        ".extern .func (.param .b64 r) give(.param .b32 x, .param .b64 y);
.visible .entry call(.param .u64 out) {
.reg .b32 %r<2>; .reg .b64 %rd<5>;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
{ .param .b32 a; .param .b64 b; .param .b64 q; st.param.b32 [a], %r1; st.param.b64 [b], 100;
call.uni (q), give, (a, b); ld.param.b64 %rd3, [q]; }
st.global.u32 [%rd1], %rd3; shr.u64 %rd4, %rd3, 32; st.global.u32 [%rd1+16], %rd4; ret; }",
    );
    let found = |definition: &str| {
        let device = linked(&[&calls, &text(definition)]).unwrap();
        let out = device.memory.upload(&[7_u32; 8]);
        device.launch("call", 1, 4, &[out]).unwrap();
        device.memory.read::<u32>(out, 8)
    };
    // Fewer parameters, and a shorter result.
    assert_eq!(
        found(
            ".visible .func (.param .b32 r) give(.param .b32 x) { .reg .b32 %r<2>;
ld.param.b32 %r1, [x]; not.b32 %r1, %r1; st.param.b32 [r], %r1; ret; }"
        ),
        [!0, !1, !2, !3, 0, 0, 0, 0]
    );
    // More parameters, and wider ones.
    assert_eq!(
        found(
            ".visible .func (.param .b64 r) give(.param .b64 x, .param .b64 y, .param .b16 z) {
.reg .b64 %r<4>; ld.param.b64 %r1, [x]; ld.param.b64 %r2, [y]; ld.param.u16 %r3, [z];
add.u64 %r1, %r1, %r2; shl.b64 %r3, %r3, 40; add.u64 %r1, %r1, %r3; st.param.b64 [r], %r1; ret; }"
        ),
        [100, 101, 102, 103, 0, 0, 0, 0]
    );
    // No result.
    let stores =
        ".visible .global .align 4 .u32 seen; .visible .func give(.param .b32 x) { .reg .b32 %r<2>;
ld.param.b32 %r1, [x]; atom.global.add.u32 %r1, [seen], %r1; ret; }";
    assert_eq!(found(stores), [0; 8]);
    let device = linked(&[&calls, &text(stores)]).unwrap();
    let out = device.memory.alloc(32);
    device.launch("call", 1, 4, &[out]).unwrap();
    let (seen, _) = device.program.variable("seen").unwrap();
    assert_eq!(device.memory.read::<u32>(seen, 1), [6]);
    // Within one text the call must match.
    let alone = text(
        ".visible .func give(.param .b32 x) { ret; }
.visible .entry k() { { .param .b32 a; .param .b32 q; call.uni (q), give, (a); } ret; }",
    );
    assert!(linked(&[&alone]).unwrap().program.kernel("k").is_err());
}

/// Kernel `meet`: each block adds its number to every slot in turn, with a barrier of the grid in between;
/// then each thread stores its block's slot plus the result of the last barrier.
const MEETS: &str = ".extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 x);
.extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 h, .param .b32 f);
.visible .entry meet(.param .u64 slots, .param .u64 out) {
.reg .pred %p<3>; .reg .b32 %r<12>; .reg .b64 %rd<9>;
ld.param.u64 %rd1, [slots]; ld.param.u64 %rd2, [out];
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, 0;
setp.ne.u32 %p1, %r3, 0;
{ .param .b32 x; .param .b64 r; st.param.b32 [x], 1; call.uni (r), cudaCGGetIntrinsicHandle, (x); ld.param.b64 %rd3, [r]; }
round:
add.u32 %r6, %r1, %r5; rem.u32 %r6, %r6, %r2; mul.wide.u32 %rd4, %r6, 4; add.u64 %rd4, %rd1, %rd4;
@%p1 bra met; ld.global.u32 %r7, [%rd4]; mad.lo.u32 %r7, %r7, 3, %r1; st.global.u32 [%rd4], %r7;
met:
{ .param .b64 h; .param .b32 f; .param .b32 r; st.param.b64 [h], %rd3; st.param.b32 [f], 0;
call.uni (r), cudaCGSynchronize, (h, f); ld.param.b32 %r8, [r]; }
add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, %r2; @%p2 bra round;
mul.wide.u32 %rd5, %r1, 4; add.u64 %rd5, %rd1, %rd5; ld.global.u32 %r9, [%rd5]; add.u32 %r9, %r9, %r8;
mad.lo.u32 %r10, %r1, %r4, %r3; mul.wide.u32 %rd6, %r10, 4; add.u64 %rd6, %rd2, %rd6; st.global.u32 [%rd6], %r9;
ret; }
";

#[test]
fn the_device_runtime_lets_a_grid_meet() {
    let device = linked(&[&text(MEETS)]).unwrap();
    let (blocks, threads) = (6_u32, 40_u32);
    let (slots, out) = (
        device.memory.alloc(4 * blocks as usize),
        device.memory.alloc((4 * blocks * threads) as usize),
    );
    let config = |cooperative, grid_workspace| LaunchConfig {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        threads: 2,
        cooperative,
        grid_workspace,
        ..LaunchConfig::default()
    };
    let workspace = device.memory.alloc(64);
    device
        .launch_with("meet", config(true, workspace), &[slots, out])
        .unwrap();
    // The order in which blocks reach a slot determines its value.
    let value = |slot: u32| {
        (0..blocks).fold(0_u32, |value, round| {
            3 * value + (slot + blocks - round) % blocks
        })
    };
    let wanted: Vec<u32> = (0..blocks * threads).map(|i| value(i / threads)).collect();
    let found = device.memory.read::<u32>(out, (blocks * threads) as usize);
    assert_eq!(found, wanted);

    // A launch that is not cooperative has no group of all threads: 999 is added to the value that it
    // stores.
    device.memory.write(slots, &[0_u32]);
    let mut alone = config(false, 0);
    alone.grid = [1; 3];
    device.launch_with("meet", alone, &[slots, out]).unwrap();
    assert_eq!(device.memory.read::<u32>(out, 1), [999]);
}

#[test]
fn a_definition_of_the_programs_own_comes_before_the_device_runtimes() {
    let own = ".visible .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 x) { .reg .b64 %rd<2>; mov.b64 %rd1, 0; st.param.b64 [r], %rd1; ret; }
.visible .func (.param .b32 r) cudaCGSynchronize(.param .b64 h, .param .b32 f) { .reg .b32 %r<2>; mov.b32 %r1, 5; st.param.b32 [r], %r1; ret; }";
    let device = linked(&[&text(MEETS), &text(own)]).unwrap();
    let (slots, out) = (device.memory.alloc(4), device.memory.alloc(4));
    device.launch("meet", 1, 1, &[slots, out]).unwrap();
    assert_eq!(device.memory.read::<u32>(out, 1), [5]);
}

const USES: &[u8] = include_bytes!("data/uses.o");
const DEFINES: &[u8] = include_bytes!("data/defines.o");
const MACHINE: &[u8] = include_bytes!("data/machine.o");
const LIBRARY: &[u8] = include_bytes!("data/library.a");
const RELOCATABLE: &[u8] = include_bytes!("data/relocatable.fatbin");

#[test]
fn object_files_and_libraries_hold_ptx() {
    let texts = [of_object(USES).unwrap(), of_object(DEFINES).unwrap()].concat();
    let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
    assert_eq!(
        run(&linked(&texts).unwrap(), "combine"),
        [112, 114, 116, 118]
    );

    let members = members(LIBRARY).unwrap();
    let names: Vec<&str> = members.iter().map(|member| &*member.name).collect();
    assert_eq!(names, ["store.o", "defines.o"]);
    let mut list = inputs(&texts[..1]);
    for member in &members {
        list.extend(member.texts.iter().map(|text| Input {
            name: &member.name,
            text,
            of_library: true,
        }));
    }
    let device = Device::load(link(&list).unwrap().as_bytes());
    assert_eq!(run(&device, "combine"), [112, 114, 116, 118]);
    assert!(device.program.kernel("store").is_err(), "nobody wanted it");
}

#[test]
fn an_object_with_machine_code_only_is_no_kernel_image() {
    assert!(matches!(
        of_object(MACHINE),
        Err(LoadError::NoKernelImage { .. })
    ));
    for object in [&b"\x7fELF"[..], b"no object"] {
        assert!(matches!(
            of_object(object),
            Err(LoadError::InvalidObject(_))
        ));
    }
    assert!(matches!(
        members(b"no archive"),
        Err(LoadError::InvalidObject(_))
    ));
}

#[test]
fn an_executable_of_several_units_is_linked_from_their_ptx() {
    let device = Device::load(RELOCATABLE);
    assert_eq!(run(&device, "combine"), [112, 114, 116, 118]);
}

#[test]
fn damaged_objects_are_errors() {
    for image in [USES, LIBRARY] {
        for cut in (0..image.len()).step_by(97) {
            // Any outcome is accepted, as long as the call returns.
            let _ = of_object(&image[..cut]);
            let _ = members(&image[..cut]);
            let mut spoilt = image.to_vec();
            spoilt[cut] ^= 0xff;
            let _ = of_object(&spoilt);
            let _ = members(&spoilt);
        }
    }
}

//! An unsupported feature fails, by name, the kernel that needs it and no other.

mod common;

use common::Device;
use wormhole_ptx::{FaultKind, KernelError, Module, Reference};

fn refused(declarations: &str, body: &str) -> KernelError {
    let text = format!(
        ".version 9.0\n.target sm_90\n.address_size 64\n{declarations}
         .visible .entry fine() {{ ret; }}
         .visible .entry k() {{
         .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; {body} ret; }}"
    );
    let program = Module::from_ptx(&text).unwrap().link(Vec::new());
    assert!(program.kernel("fine").is_ok());
    program.kernel("k").unwrap_err()
}

#[test]
fn instructions_are_named() {
    for instruction in [
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd1], [%rd2, {%r1, %r2}], [%rd3]",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%rd1], %r1, [%rd2]",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%rd1], %r1, [%rd2]",
        "multimem.cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%rd2], %r1",
        "wgmma.commit_group.sync.aligned",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, %rd2, {%f5, %f6}]",
        "txq.channel_order.b32 %r1, [%rd1]",
        "sust.p.2d.v4.b32.trap [%rd1, {%r1, %r2}], {%r3, %r4, %r5, %r6}",
        "add.f128 %f1, %f2, %f3",
    ] {
        let error = refused("", &format!("{instruction};"));
        let name = instruction.split(' ').next().unwrap();
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// Checks each pair of an operation and a type of `sured`. A reduction of an element of 2 bytes would change 8.
#[test]
fn a_surface_has_reductions_of_32_and_64_bit_integers_alone() {
    const TYPES: [&str; 20] = [
        "u8", "s8", "b8", "u16", "s16", "b16", "f16", "bf16", "u32", "s32", "b32", "f32", "f16x2",
        "bf16x2", "u64", "s64", "b64", "f64", "b128", "pred",
    ];
    for (op, types) in [
        ("add", &["u32", "s32", "u64"][..]),
        ("min", &["u32", "s32", "u64", "s64"]),
        ("max", &["u32", "s32", "u64", "s64"]),
        ("and", &["b32"]),
        ("or", &["b32"]),
        ("xor", &[]),
        ("exch", &[]),
        ("inc", &[]),
    ] {
        for ty in TYPES {
            let register = if ty.ends_with("64") { "%rd2" } else { "%r2" };
            let text = format!(
                ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k() {{
                 .reg .b32 %r<9>; .reg .b64 %rd<9>;
                 sured.b.{op}.1d.{ty}.trap [%rd1, {{%r1}}], {register}; ret; }}"
            );
            let is_taken = Module::from_ptx(&text)
                .is_ok_and(|module| module.link(Vec::new()).kernel("k").is_ok());
            assert_eq!(is_taken, types.contains(&ty), "{op} of {ty}");
        }
    }
}

/// Checks a kernel whose grid's extents count clusters.
#[test]
fn a_kernel_whose_blocks_are_clusters_is_named() {
    let text = ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k()
         .reqntid 32, 1, 1 .reqnctapercluster 2, 1, 1 .blocksareclusters { ret; }";
    let program = Module::from_ptx(text).unwrap().link(Vec::new());
    let error = program.kernel("k").unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }));
    assert!(error.to_string().contains(".blocksareclusters"), "{error}");
}

#[test]
fn functions_of_the_device_runtime_are_named() {
    let declaration = ".extern .func (.param .b64 r) cudaGetParameterBufferV2 (.param .b64 f, .param .align 4 .b8 g[12]);";
    let call = "{ .param .b64 f; .param .align 4 .b8 g[12]; .param .b64 r;
                call.uni (r), cudaGetParameterBufferV2, (f, g); }";
    let error = refused(declaration, call);
    assert!(matches!(error, KernelError::UnknownFunction { .. }));
    assert!(
        error.to_string().contains("`cudaGetParameterBufferV2`"),
        "{error}"
    );
}

/// Checks that a reference is a handle that the device replaces.
#[test]
fn a_reference_is_a_word_of_the_device_s_own() {
    let module = |declaration: &str| {
        let head = ".version 7.0\n.target sm_70\n.address_size 64\n.global .align 1 ";
        Module::from_ptx(&format!("{head}{declaration};\n"))
    };
    for kind in [".texref", ".surfref", ".samplerref"] {
        assert!(module(&format!(".attribute(.managed) {kind} r")).is_err());
        let program = module(&format!("{kind} r")).unwrap();
        let variable = &program.variables()[0];
        assert_eq!((variable.align(), variable.size()), (8, 8), "{kind}");
    }
    for (declaration, found) in [(".texref r", Some(4096)), (".texref r[0]", None)] {
        let program = module(declaration).map(|module| module.link(vec![4096]));
        let reference = program.map(|program| program.reference("r", Reference::Texture));
        assert_eq!(reference.ok().flatten(), found, "{declaration}");
    }
}

/// This device has no multicast objects, but kernels for other devices may contain accesses to them.
#[test]
fn an_access_to_a_multicast_object_faults_when_it_is_executed() {
    for instruction in [
        "multimem.ld_reduce.global.add.f32 %f1, [%rd1]",
        "multimem.ld_reduce.acquire.sys.global.min.u64 %rd2, [%rd1]",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%r1, %r2, %r3, %r4}, [%rd1]",
        "multimem.st.release.gpu.global.v2.f32 [%rd1 + 8], {%f1, %f2}",
        "multimem.red.relaxed.sys.global.xor.b32 [%rd1], %r1",
    ] {
        let text = format!(
            ".version 9.0\n.target sm_90\n.address_size 64
             .visible .entry k(.param .u64 object) {{
             .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
             ld.param.u64 %rd1, [object]; setp.ne.u64 %p1, %rd1, 0; @%p1 {instruction}; ret; }}"
        );
        let device = Device::load(text.as_bytes());
        device.launch("k", 1, 32, &[0]).unwrap();
        let memory = device.memory.upload(&[0_u64; 4]);
        let fault = device.launch("k", 1, 32, &[memory]).unwrap_err();
        assert!(
            matches!(fault.kind, FaultKind::IllegalInstruction(_)),
            "{fault}"
        );
        assert!(fault.to_string().contains("multicast"), "{fault}");
    }
    for instruction in [
        "multimem.ld_reduce.global.xor.f32 %f1, [%rd1]",
        "multimem.ld_reduce.global.add.b32 %r1, [%rd1]",
        "multimem.ld_reduce.release.gpu.global.add.u32 %r1, [%rd1]",
        "multimem.st.global.b8 [%rd1], %r1",
        "multimem.red.global.add.acc::f32.f16x2 [%rd1], %r1",
    ] {
        let error = refused("", &format!("{instruction};"));
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
    for instruction in [
        "multimem.ld_reduce.global.f32 %f1, [%rd1]",
        "multimem.st.global.v2.f32 [%rd1], %f1",
        "multimem.red.global.add.u32 [%rd1]",
    ] {
        let error = refused("", &format!("{instruction};"));
        assert!(matches!(error, KernelError::Malformed { .. }), "{error}");
    }
}

/// Checks `uses_cluster`: a device without clusters launches in clusters only kernels that do not use
/// theirs.
#[test]
fn a_kernel_that_asks_for_its_cluster_is_known() {
    let asks = |body: &str| {
        let text = format!(
            ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k() {{
             .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<4>; {body} ret; }}"
        );
        let program = Module::from_ptx(&text).unwrap().link(Vec::new());
        program.kernel("k").unwrap().uses_cluster()
    };
    for body in [
        "mov.u32 %r1, %cluster_ctarank;",
        "mov.u32 %r1, %clusterid.x;",
        "mov.u32 %r1, %cluster_nctaid.y;",
        "mov.pred %p1, %is_explicit_cluster;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "mapa.u64 %rd1, %rd2, %r1;",
        "getctarank.u64 %r1, %rd1;",
    ] {
        assert!(asks(body), "{body}");
    }
    for body in [
        "mov.u32 %r1, %ctaid.x;",
        "bar.sync 0;",
        "fence.acq_rel.cluster;",
    ] {
        assert!(!asks(body), "{body}");
    }
}

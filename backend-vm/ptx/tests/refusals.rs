//! What the engine lacks is refused by name, in the kernel that needs it and in no other.

use wormhole_ptx::{KernelError, Module, Reference};

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
        "multimem.ld_reduce.global.add.f32 %f1, [%rd1]",
        "wgmma.commit_group.sync.aligned",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, %rd2, {%f5, %f6}]",
        "txq.channel_order.b32 %r1, [%rd1]",
        "sust.p.2d.v4.b32.trap [%rd1, {%r1, %r2}], {%r3, %r4, %r5, %r6}",
        "add.f128 %f1, %f2, %f3",
    ] {
        let error = refused("", &format!("{instruction};"));
        let name = instruction.split(' ').next().unwrap();
        assert_eq!(error.cuda_code(), 801, "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn functions_of_the_device_runtime_are_named() {
    let declaration = ".extern .func (.param .b64 r) cudaGetParameterBufferV2 (.param .b64 f, .param .align 4 .b8 g[12]);";
    let call = "{ .param .b64 f; .param .align 4 .b8 g[12]; .param .b64 r;
                call.uni (r), cudaGetParameterBufferV2, (f, g); }";
    let error = refused(declaration, call);
    assert_eq!(error.cuda_code(), 801);
    assert!(
        error.to_string().contains("`cudaGetParameterBufferV2`"),
        "{error}"
    );
}

/// Its value is a handle that the device exchanges.
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

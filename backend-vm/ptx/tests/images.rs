//! Loads images that nvcc made, and damaged ones.

mod common;

use common::Device;
use proptest::prelude::*;
use wormhole_ptx::{KernelError, LoadError, Module};

const ZSTD: &[u8] = include_bytes!("data/zstd.fatbin");
const LZ4: &[u8] = include_bytes!("data/lz4.fatbin");
const PLAIN: &[u8] = include_bytes!("data/plain.fatbin");
const BOTH: &[u8] = include_bytes!("data/both.fatbin");
const CUBIN: &[u8] = include_bytes!("data/cubin.fatbin");
const EMPTY: &[u8] = include_bytes!("data/empty.fatbin");
const BASICS: &str = include_str!("kernels/basics.ptx");
const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

#[test]
fn fatbins_of_every_compression_run() {
    let twice = [EMPTY, ZSTD].concat();
    for image in [ZSTD, LZ4, PLAIN, BOTH, &twice] {
        let device = Device::load(image);
        let out = device.memory.alloc(128);
        device.launch("store", 1, 32, &[out, 7]).unwrap();
        assert_eq!(device.memory.read::<i32>(out, 32), [7; 32]);
    }
}

#[test]
fn machine_code_alone_is_no_kernel_image_unless_it_has_no_kernels() {
    assert_eq!(variant(Module::load(CUBIN).unwrap_err()), "NoKernelImage");
    assert_eq!(Module::load(EMPTY).unwrap().kernel_names().count(), 0);
}

#[test]
fn a_missing_instruction_fails_its_kernel_alone() {
    let text = format!(
        "{HEAD}.entry good() {{ ret; }}\n.entry bad() {{\n.reg .b32 %r<3>;\nfrobnicate.sync.u32 %r1, %r2;\nret; }}"
    );
    let program = Module::load(text.as_bytes()).unwrap().link(Vec::new());
    program.kernel("good").unwrap();
    let error = program.kernel("bad").unwrap_err();
    assert_eq!(
        error.to_string(),
        "kernel `bad`: instruction `frobnicate.sync.u32` is not supported by the CPU device (line 7)"
    );
    assert_eq!(
        program.kernel("other").unwrap_err(),
        KernelError::NotFound("other".to_owned())
    );
}

/// Returns the name of an error's variant.
fn variant(error: impl std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let name = text.split(|c: char| !c.is_alphanumeric()).next();
    name.unwrap_or_default().to_owned()
}

/// The refusal by an error of a variant.
fn refused(variant: &str) -> Result<(), String> {
    Err(variant.to_owned())
}

#[test]
fn malformed_code_is_distinguished_from_unsupported_code() {
    let kernel = |body: &str| {
        let text = format!("{HEAD}.entry k() {{ .reg .b32 %r<3>; .reg .pred %p<2>; {body} ret; }}");
        Module::load(text.as_bytes())
            .map_err(variant)
            .and_then(|module| {
                module
                    .link(Vec::new())
                    .kernel("k")
                    .map(|_| ())
                    .map_err(variant)
            })
    };
    assert_eq!(kernel("add.u32 %r1, %r1, %r2;"), Ok(()));
    assert_eq!(kernel("add.u32 %r1, %r1, %r3;"), refused("Malformed"));
    assert_eq!(kernel("add.u32 %r1, %r1;"), refused("Malformed"));
    assert_eq!(kernel("bra NOWHERE;"), refused("Malformed"));
    assert_eq!(kernel("@%p2 bra NOWHERE;"), refused("Malformed"));
    assert_eq!(kernel("add.u32 %r1, %r1, %r2"), refused("InvalidPtx"));
    assert_eq!(kernel("call nobody;"), refused("UnknownFunction"));
    assert_eq!(kernel("wgmma.fence.sync.aligned;"), refused("Unsupported"));
}

#[test]
fn shared_memory_and_parameters_are_laid_out() {
    let text = format!(
        "{HEAD}.extern .shared .align 16 .b8 dynamic[];\n.shared .align 4 .b8 unused[128];\n
         .entry k(.param .u8 a, .param .align 8 .b8 b[12], .param .u16 c) .maxntid 64, 2, 1 {{
         .reg .b32 %r<3>; .shared .align 4 .b8 s[20]; mov.u32 %r1, dynamic; mov.u32 %r2, s; ret; }}"
    );
    let kernel = Module::load(text.as_bytes())
        .unwrap()
        .link(Vec::new())
        .kernel("k")
        .unwrap();
    assert_eq!(kernel.shared_bytes(), 20);
    assert_eq!(kernel.max_threads_per_block(), 128);
    let layout: Vec<(u32, u32)> = kernel
        .params()
        .iter()
        .map(|param| (param.offset, param.size))
        .collect();
    assert_eq!(layout, [(0, 1), (8, 12), (20, 2)]);
    assert_eq!(kernel.param_bytes(), 22);
}

#[test]
fn what_an_image_may_ask_for_is_bounded() {
    let code = |text: &str| {
        Module::load(format!("{HEAD}{text}").as_bytes())
            .map(|_| ())
            .map_err(variant)
    };
    assert_eq!(
        code(".global .b8 x[99999999999999];"),
        refused("InvalidPtx")
    );
    assert_eq!(
        code(".global .b64 x[4611686018427387905];"),
        refused("InvalidPtx")
    );
    assert_eq!(
        code(&format!(".global .u8 x = {};", "{".repeat(1 << 20))),
        refused("InvalidPtx")
    );
    let kernel = |body: &str| {
        let text = format!("{HEAD}.entry k() {{ {body} ret; }}");
        let program = Module::load(text.as_bytes()).unwrap().link(Vec::new());
        program.kernel("k").map(|_| ()).map_err(variant)
    };
    assert_eq!(kernel(".reg .b32 %r<4000000000>;"), Ok(()));
    assert_eq!(kernel(".local .b8 l[1000000000];"), refused("TooLarge"));
    assert_eq!(kernel(".shared .b8 s[1000000];"), refused("TooLarge"));
    let many: String = (0..70_000)
        .map(|i| format!("mov.u32 %r{i}, {i};"))
        .collect();
    assert_eq!(
        kernel(&format!(".reg .b32 %r<70000>; {many}")),
        refused("TooLarge")
    );
    let mut bomb = LZ4.to_vec();
    bomb[0x48..0x50].copy_from_slice(&(200_u64 << 20).to_le_bytes());
    assert!(matches!(
        Module::load(&bomb),
        Err(LoadError::InvalidImage(_))
    ));
}

/// Loads an image and decodes every kernel in it; it must return, with any outcome.
fn digest(image: &[u8]) {
    if let Ok(module) = Module::load(image) {
        let names: Vec<String> = module.kernel_names().map(str::to_owned).collect();
        let addresses = vec![0x2_0000_0000; module.variables().len()];
        let program = module.link(addresses);
        for name in names {
            let _ = program.kernel(&name);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn mutated_fatbins_never_panic(
        which in 0_usize..6,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut image = [ZSTD, LZ4, PLAIN, BOTH, CUBIN, EMPTY][which].to_vec();
        for (at, byte) in edits {
            let at = at.index(image.len());
            image[at] = byte;
        }
        digest(&image);
        digest(&image[..cut.index(image.len())]);
    }

    #[test]
    fn mutated_text_never_panics(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0_usize..40), 1..12),
    ) {
        // Moves pieces of the text to other places: most of the text remains valid words.
        let mut text = BASICS.to_owned();
        for (from, to, length) in edits {
            let (from, to) = (from.index(text.len()), to.index(text.len()));
            let piece: String = text.chars().skip(from).take(length).collect();
            text.insert_str(to, &piece);
            let end = (to + piece.len() + length / 2).min(text.len());
            text.replace_range(to + piece.len()..end, "");
        }
        digest(text.as_bytes());
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        digest(&bytes);
        digest(&[HEAD.as_bytes(), &bytes].concat());
        digest(&[&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0], &bytes[..]].concat());
    }
}

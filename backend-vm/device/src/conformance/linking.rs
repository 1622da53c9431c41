//! Links, and the logs of compiler and linker.

use wormhole_api::constants::jit_input;

use super::{
    Check, HostMemory, ONE_THREAD, Outcome, function, holds, kernels, launch, load_image, same,
    worked,
};
use crate::{CuError, Device, ImageKind, Jit, LinkInput, RawStream, Result};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a link of PTX gives an image that can be loaded",
        run: linked,
    },
    Check {
        name: "a link of text other than PTX is refused",
        run: unlinkable,
    },
    Check {
        name: "a function of another text is called",
        run: across,
    },
    Check {
        name: "a strong definition comes before a weak one, of which the first counts",
        run: weak,
    },
    Check {
        name: "a variable of another text is read",
        run: variable,
    },
    Check {
        name: "a link without a definition fails with its name in the log",
        run: missing,
    },
    Check {
        name: "an input with a second definition is refused with its name in the log",
        run: twice,
    },
    Check {
        name: "an input that is none is refused by its kind",
        run: kinds,
    },
    Check {
        name: "a load of invalid PTX writes the fault to the log",
        run: diagnostics,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

const HEAD: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";
/// Kernel that stores `number(21)`.
const USE: &str = "
.extern .func (.param .b32 r) number(.param .b32 x);
.visible .entry use(.param .u64 out) {
.reg .b64 %rd<3>; .reg .b32 %r<3>;
ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1; mov.u32 %r1, 21;
{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r1; call.uni (q), number, (p); ld.param.b32 %r2, [q]; }
st.global.u32 [%rd2], %r2; ret; }
";
/// Kernel that stores `counter`.
const READ: &str = "
.extern .global .align 4 .u32 counter;
.visible .entry use(.param .u64 out) {
.reg .b64 %rd<3>; .reg .b32 %r<2>;
ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
ld.global.u32 %r1, [counter]; st.global.u32 [%rd2], %r1; ret; }
";

/// Function `number`, a product with `factor`.
fn number(linkage: &str, factor: u32) -> String {
    format!(
        "{HEAD}{linkage} .func (.param .b32 r) number(.param .b32 x) {{
.reg .b32 %r<3>; ld.param.b32 %r1, [x]; mul.lo.u32 %r2, %r1, {factor}; st.param.b32 [r], %r2; ret; }}\n"
    )
}

fn text(body: &str) -> String {
    format!("{HEAD}{body}")
}

/// Makes inputs of the texts, with the names `a`, `b` and `c`.
fn inputs<'a>(texts: &[&'a str]) -> Vec<LinkInput<'a>> {
    let names = ["a", "b", "c"];
    let texts = texts.iter().zip(names);
    texts
        .map(|(text, name)| LinkInput {
            kind: jit_input::PTX,
            name,
            data: text.as_bytes(),
        })
        .collect()
}

fn jit() -> Jit {
    Jit {
        log_bytes: 4096,
        ..Jit::default()
    }
}

fn link(device: &dyn Device, texts: &[&str]) -> (Result<Vec<u8>>, String) {
    let mut jit = jit();
    let linked = device.link(&inputs(texts), &mut jit);
    (linked, String::from_utf8_lossy(&jit.errors).into_owned())
}

/// Links and runs the kernel `use`. Returns the stored value.
fn stored(device: &dyn Device, texts: &[&str]) -> std::result::Result<u32, String> {
    let image = worked("link", link(device, texts).0)?;
    let module = load_image(device, &image, ImageKind::Module)?;
    let kernel = function(device, &module, "use")?;
    let host = HostMemory::new(device, 1)?;
    let arguments = [host.address(0)];
    worked(
        "launch",
        launch(device, LEGACY, &kernel, ONE_THREAD, &arguments),
    )?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.half_word(0).load(std::sync::atomic::Ordering::Acquire))
}

fn read(device: &dyn Device, address: u64) -> std::result::Result<u32, String> {
    let host = HostMemory::new(device, 1)?;
    worked("copy", device.mem_copy(host.address(0), address, 4, LEGACY))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.half_word(0).load(std::sync::atomic::Ordering::Acquire))
}

fn across(device: &dyn Device) -> Outcome {
    let (uses, defines) = (text(USE), number(".visible", 2));
    same("the product", stored(device, &[&uses, &defines])?, 42)?;
    same("the other way", stored(device, &[&defines, &uses])?, 42)
}

fn weak(device: &dyn Device) -> Outcome {
    let uses = text(USE);
    let (first, second) = (number(".weak", 3), number(".weak", 5));
    let strong = number(".visible", 2);
    same("the first", stored(device, &[&uses, &first, &second])?, 63)?;
    same("the strong", stored(device, &[&uses, &first, &strong])?, 42)
}

fn variable(device: &dyn Device) -> Outcome {
    let defines = text(".visible .global .align 4 .u32 counter = 7;\n");
    same("the counter", stored(device, &[&text(READ), &defines])?, 7)
}

fn missing(device: &dyn Device) -> Outcome {
    for (uses, name) in [(USE, "number"), (READ, "counter")] {
        let uses = text(uses);
        let tried = device.try_link(&inputs(&[&uses]), &mut jit());
        worked("adding what wants more", tried)?;
        let (linked, log) = link(device, &[&uses]);
        same("linking", linked.err(), Some(CuError::INVALID_SOURCE))?;
        let wanted = format!("error   : Undefined reference to '{name}' in 'a'");
        same("the log", log.trim_end(), wanted.as_str())?;
    }
    Ok(())
}

fn twice(device: &dyn Device) -> Outcome {
    let defines = number(".visible", 2);
    let mut jit = jit();
    let tried = device.try_link(&inputs(&[&defines, &defines]), &mut jit);
    same("adding", tried.err(), Some(CuError::INVALID_SOURCE))?;
    let log = String::from_utf8_lossy(&jit.errors).into_owned();
    let wanted = "error   : Multiple definition of 'number' in 'b', first defined in 'a'";
    same("the log", log.trim_end(), wanted)
}

fn kinds(device: &dyn Device) -> Outcome {
    let garbage = |kind| {
        let input = LinkInput {
            kind,
            name: "garbage",
            data: b"garbage garbage garbage",
        };
        device.try_link(&[input], &mut jit()).err()
    };
    let unknown = Some(CuError::UNKNOWN);
    same("an object", garbage(jit_input::OBJECT), unknown)?;
    // The driver's answer depends on the bytes.
    let library = garbage(jit_input::LIBRARY);
    let known = [unknown, Some(CuError::INVALID_IMAGE)];
    holds("a library is refused", known.contains(&library))?;
    let image = Some(CuError::INVALID_IMAGE);
    same("a fat binary", garbage(jit_input::FATBINARY), image)?;
    same("machine code", garbage(jit_input::CUBIN), image)
}

fn diagnostics(device: &dyn Device) -> Outcome {
    let nonsense = text("this is no PTX\n");
    let mut jit = jit();
    let loaded = device.load(nonsense.as_bytes(), ImageKind::Module, &mut jit, None);
    same("loading", loaded.err(), Some(CuError::INVALID_PTX))?;
    let log = String::from_utf8_lossy(&jit.errors).into_owned();
    holds("the log names the line", log.contains("line 4"))
}

fn linked(device: &dyn Device) -> Outcome {
    let text = [kernels::PLAIN.as_bytes(), &[0]].concat();
    for data in [kernels::PLAIN.as_bytes(), &text] {
        let kind = jit_input::PTX;
        let input = LinkInput {
            kind,
            name: "plain",
            data,
        };
        let image = worked("link", device.link(&[input], &mut Jit::default()))?;
        let library = load_image(device, &image, ImageKind::Library)?;
        let bump = function(device, &library, "bump")?;
        worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
        let (counter, _) = worked("global", device.global(library.module, "counter"))?;
        same("the counter", read(device, counter)?, 8)?;
    }
    Ok(())
}

fn unlinkable(device: &dyn Device) -> Outcome {
    let data = b".version 7.0\n.target sm_70\n.address_size 64\nthis is no PTX\n";
    let input = LinkInput {
        kind: jit_input::PTX,
        name: "nonsense",
        data,
    };
    let result = device.try_link(&[input], &mut Jit::default()).err();
    same("trying", result, Some(CuError::INVALID_PTX))?;
    let result = device.link(&[input], &mut Jit::default()).err();
    same("linking", result, Some(CuError::INVALID_PTX))
}

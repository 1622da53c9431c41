//! Links PTX inputs (`cuLink*`) into one PTX text, which loads like any other image.

use std::borrow::Cow;

use wormhole_device::LinkInput;
use wormhole_device::constants::jit_input;
use wormhole_ptx::LoadError;
use wormhole_ptx::image::{Found, find_ptx, members, of_object};
use wormhole_ptx::link::{Input, LinkError};

/// PTX text of an input.
struct Text<'a> {
    name: Cow<'a, str>,
    text: Cow<'a, str>,
    of_library: bool,
}

/// Checks that the inputs can be linked together.
pub fn try_link(inputs: &[LinkInput<'_>]) -> Result<(), LoadError> {
    with_texts(inputs, wormhole_ptx::link::try_link)
}

/// Links the inputs into one image: PTX text that ends with a zero byte.
pub fn link(inputs: &[LinkInput<'_>]) -> Result<Vec<u8>, LoadError> {
    let linked = with_texts(inputs, wormhole_ptx::link::link)?;
    wormhole_ptx::Module::from_ptx(&linked)?;
    let mut image = linked.into_bytes();
    image.push(0);
    Ok(image)
}

fn with_texts<R>(
    inputs: &[LinkInput<'_>],
    then: fn(&[Input<'_>]) -> Result<R, LinkError>,
) -> Result<R, LoadError> {
    let mut texts = Vec::new();
    for input in inputs {
        take(input, &mut texts)?;
    }
    let inputs: Vec<Input<'_>> = texts
        .iter()
        .map(|text| Input {
            name: &text.name,
            text: &text.text,
            of_library: text.of_library,
        })
        .collect();
    Ok(then(&inputs)?)
}

/// Adds the PTX texts of an input.
fn take<'a>(input: &LinkInput<'a>, texts: &mut Vec<Text<'a>>) -> Result<(), LoadError> {
    let name = Cow::Borrowed(input.name);
    let own = |text| Text {
        name: name.clone(),
        text,
        of_library: false,
    };
    match input.kind {
        // This device links PTX, whichever of these kinds the program declares.
        jit_input::CUBIN | jit_input::PTX | jit_input::FATBINARY => {
            if let Found::Ptx(text) = find_ptx(input.data)? {
                texts.push(own(text));
            }
        }
        jit_input::OBJECT => texts.extend(of_object(input.data)?.into_iter().map(own)),
        jit_input::LIBRARY => {
            for member in members(input.data)? {
                let name = format!("{name}({})", member.name);
                texts.extend(member.texts.into_iter().map(|text| Text {
                    name: Cow::Owned(name.clone()),
                    text,
                    of_library: true,
                }));
            }
        }
        _ => return Err(LoadError::Intermediate),
    }
    Ok(())
}

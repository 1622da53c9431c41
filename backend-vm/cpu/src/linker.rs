//! Links PTX: what `cuLinkComplete` gives on this device is PTX again, which loads like any other.

use std::borrow::Cow;

use wormhole_device::{CuError, LinkInput, Result};
use wormhole_ptx::image::{Found, find_ptx};

/// Links the inputs into one image: PTX text that ends with a zero byte. Two inputs with PTX are
/// `CUDA_ERROR_NOT_SUPPORTED`, as are object files and libraries.
pub fn link(inputs: &[LinkInput<'_>]) -> Result<Vec<u8>> {
    let mut texts = Vec::new();
    for input in inputs {
        texts.extend(text(input)?);
    }
    let [text] = texts.as_slice() else {
        tracing::warn!(
            inputs = texts.len(),
            "a link is refused: this device links one input with PTX"
        );
        return Err(CuError::NOT_SUPPORTED);
    };
    wormhole_ptx::Module::from_ptx(text).map_err(|error| refused(&error))?;
    Ok([text.as_bytes(), &[0]].concat())
}

/// The PTX of an input; `None` if it is an image without kernels.
fn text<'a>(input: &LinkInput<'a>) -> Result<Option<Cow<'a, str>>> {
    match input.kind {
        LinkInput::CUBIN | LinkInput::PTX | LinkInput::FATBINARY => {}
        LinkInput::OBJECT | LinkInput::LIBRARY => {
            tracing::warn!("a link is refused: this device reads no object files");
            return Err(CuError::NOT_SUPPORTED);
        }
        _ => return Err(CuError::INVALID_VALUE),
    }
    match find_ptx(input.data).map_err(|error| refused(&error))? {
        Found::Ptx(text) => Ok(Some(text)),
        Found::Empty => Ok(None),
    }
}

fn refused(error: &wormhole_ptx::LoadError) -> CuError {
    tracing::warn!(%error, "a link is refused");
    CuError(error.cuda_code())
}

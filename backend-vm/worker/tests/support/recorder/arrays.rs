//! Arrays of the recorder: handles only. Copies log the bytes of a row.

use wormhole_device::{
    ArrayShape, Arrays, CuError, MemCopy3d, RawArray, RawMipmap, RawStream, Resource, Result,
    Sampling, View,
};

use super::Recorder;

impl Arrays for Recorder {
    fn create_array(&self, _: &ArrayShape) -> Result<RawArray> {
        self.arrive("create_array");
        Ok(RawArray(self.make()))
    }
    fn create_mipmap(&self, _: &ArrayShape, _: u32) -> Result<RawMipmap> {
        self.arrive("create_mipmap");
        Ok(RawMipmap(self.make()))
    }
    fn create_texture(&self, resource: &Resource, _: &Sampling, _: Option<&View>) -> Result<u64> {
        self.arrive("create_texture");
        match *resource {
            Resource::Array(array) => self.check(array.0)?,
            Resource::Mipmap(mipmap) => self.check(mipmap.0)?,
            Resource::Linear { .. } | Resource::Rows { .. } => {}
        }
        Ok(self.make())
    }
    fn create_surface(&self, array: RawArray) -> Result<u64> {
        self.check(array.0)?;
        Ok(self.make())
    }
    fn copy_3d(&self, copy: &MemCopy3d, stream: RawStream) -> Result<()> {
        self.check(stream.0)?;
        self.enter(u32::try_from(copy.extent[0]).map_err(|_| CuError::INVALID_VALUE)?);
        Ok(())
    }
}

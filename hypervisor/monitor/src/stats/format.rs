//! Parses KVM's binary statistics: header, descriptors, data.

use zerocopy::byteorder::{NativeEndian, U16, U32};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::Values;

/// Maximum number of statistics of one object; KVM has about fifty.
const MAX_DESCRIPTORS: u32 = 4096;
/// Maximum bytes of a name; KVM uses 48.
const MAX_NAME: u32 = 1024;
/// Maximum number of values of one statistic; KVM's histograms have up to 64.
const MAX_ITEMS: usize = 4096;
const ITEM: usize = 8;

/// Error from parsing the format.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// Reading failed.
    #[error("cannot read the description of the statistics")]
    Read(#[from] std::io::Error),
    /// A count or size in the header exceeds the limits.
    #[error("the header announces {descriptors} statistics with names of {name_size} bytes")]
    Header {
        /// Number of descriptors according to the header.
        descriptors: u32,
        /// Size of names according to the header.
        name_size: u32,
    },
    /// A descriptor exceeds the limits.
    #[error("statistic {name:?} has {items} numbers at offset {offset}")]
    Descriptor {
        /// Name of the statistic.
        name: String,
        /// Number of values according to the descriptor.
        items: usize,
        /// Offset of the values according to the descriptor.
        offset: usize,
    },
}

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    flags: U32<NativeEndian>,
    name_size: U32<NativeEndian>,
    descriptors: U32<NativeEndian>,
    id_offset: U32<NativeEndian>,
    descriptor_offset: U32<NativeEndian>,
    data_offset: U32<NativeEndian>,
}

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Descriptor {
    flags: U32<NativeEndian>,
    exponent: U16<NativeEndian>,
    size: U16<NativeEndian>,
    offset: U32<NativeEndian>,
    bucket_size: U32<NativeEndian>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Statistic {
    name: String,
    offset: usize,
    items: usize,
}

/// Names of the statistics and offsets of their values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema {
    /// Identity of the object, such as `kvm-77/vcpu-0`.
    id: String,
    data_offset: u64,
    data_len: usize,
    statistics: Vec<Statistic>,
}

impl Schema {
    /// Parses the file that `read` (offset, buffer to fill) reads. Total: any bytes yield a schema or an
    /// error, and the amount read is bounded.
    pub fn parse(
        mut read: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    ) -> Result<Self, FormatError> {
        let mut bytes = [0; size_of::<Header>()];
        read(0, &mut bytes)?;
        let header: Header = zerocopy::transmute!(bytes);
        let (descriptors, name_size) = (header.descriptors.get(), header.name_size.get());
        let name_len = usize::try_from(name_size)
            .ok()
            .filter(|_| name_size <= MAX_NAME);
        let (Some(name_len), 0..=MAX_DESCRIPTORS) = (name_len, descriptors) else {
            return Err(FormatError::Header {
                descriptors,
                name_size,
            });
        };
        let mut id = vec![0; name_len];
        read(u64::from(header.id_offset.get()), &mut id)?;
        let entry_len = size_of::<Descriptor>() + name_len;
        let mut entry = vec![0; entry_len];
        let mut at = u64::from(header.descriptor_offset.get());
        let mut statistics = Vec::new();
        let mut data_len = 0;
        for _ in 0..descriptors {
            read(at, &mut entry)?;
            at += entry_len as u64;
            let statistic = parse_descriptor(&entry)?;
            data_len = data_len.max(statistic.offset + statistic.items * ITEM);
            statistics.push(statistic);
        }
        Ok(Self {
            id: text(&id),
            data_offset: u64::from(header.data_offset.get()),
            data_len,
            statistics,
        })
    }

    /// Returns the identity of the object to which the statistics belong.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the file offset of the values.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Returns the size of all values in bytes.
    pub fn data_len(&self) -> usize {
        self.data_len
    }

    /// Returns the values in `data`, without those past its end.
    pub fn values(&self, data: &[u8]) -> Values {
        let mut values = Values::new();
        for statistic in &self.statistics {
            let numbers = data
                .get(statistic.offset..)
                .unwrap_or(&[])
                .chunks_exact(ITEM)
                .take(statistic.items)
                .filter_map(|chunk| chunk.try_into().ok().map(u64::from_ne_bytes));
            for (index, number) in numbers.enumerate() {
                let name = if statistic.items == 1 {
                    statistic.name.clone()
                } else {
                    format!("{}[{index}]", statistic.name)
                };
                values.insert(name, number);
            }
        }
        values
    }
}

/// Returns the text of a field that ends with a zero byte, or with the field.
fn text(field: &[u8]) -> String {
    let text = field.split(|byte| *byte == 0).next().unwrap_or(&[]);
    String::from_utf8_lossy(text).into_owned()
}

fn parse_descriptor(entry: &[u8]) -> Result<Statistic, FormatError> {
    let (descriptor, name) = Descriptor::ref_from_prefix(entry)
        .map_err(|_| FormatError::Read(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)))?;
    let name = text(name);
    let items = usize::from(descriptor.size.get());
    let offset = usize::try_from(descriptor.offset.get()).unwrap_or(usize::MAX);
    if items > MAX_ITEMS || offset > 1 << 20 {
        return Err(FormatError::Descriptor {
            name,
            items,
            offset,
        });
    }
    Ok(Statistic {
        name,
        offset,
        items,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a file as KVM lays it out: header, identity and names of `name_size` bytes, values.
    fn file(statistics: &[(&str, u16, u32)], name_size: u32, values: &[u64]) -> Vec<u8> {
        let descriptors = u32::try_from(statistics.len()).expect("few");
        let id_offset = 24u32;
        let descriptor_offset = id_offset + name_size;
        let data_offset = descriptor_offset + descriptors * (16 + name_size);
        let mut bytes = Vec::new();
        for word in [
            0,
            name_size,
            descriptors,
            id_offset,
            descriptor_offset,
            data_offset,
        ] {
            bytes.extend(word.to_ne_bytes());
        }
        let mut id = b"kvm-77".to_vec();
        id.resize(name_size as usize, 0);
        bytes.extend(id);
        for (name, size, offset) in statistics {
            bytes.extend(0u32.to_ne_bytes());
            bytes.extend(0u16.to_ne_bytes());
            bytes.extend(size.to_ne_bytes());
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(0u32.to_ne_bytes());
            let mut field = name.as_bytes().to_vec();
            field.resize(name_size as usize, 0);
            bytes.extend(field);
        }
        for value in values {
            bytes.extend(value.to_ne_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Schema, FormatError> {
        Schema::parse(|offset, buffer| {
            let start = usize::try_from(offset).expect("small");
            let source = start
                .checked_add(buffer.len())
                .and_then(|end| bytes.get(start..end))
                .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::UnexpectedEof))?;
            buffer.copy_from_slice(source);
            Ok(())
        })
    }

    #[test]
    fn names_and_values_are_found() {
        let bytes = file(&[("exits", 1, 0), ("wait", 2, 8)], 48, &[7, 1, 2]);
        let schema = parse(&bytes).expect("schema");
        assert_eq!(schema.id(), "kvm-77");
        let data = &bytes[usize::try_from(schema.data_offset()).expect("small")..];
        assert_eq!(schema.data_len(), 24);
        let values = schema.values(data);
        assert_eq!(values["exits"], 7);
        assert_eq!((values["wait[0]"], values["wait[1]"]), (1, 2));
    }

    #[test]
    fn absurd_headers_are_refused() {
        let mut bytes = file(&[], 48, &[]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(matches!(parse(&bytes), Err(FormatError::Header { .. })));
        let bytes = file(&[("far", 1, u32::MAX)], 48, &[]);
        assert!(matches!(parse(&bytes), Err(FormatError::Descriptor { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_schema_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            data in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(schema) = parse(&bytes) {
                schema.values(&data);
            }
        }

        #[test]
        fn a_broken_file_gives_a_schema_or_an_error(index in 0usize..200, value: u8) {
            let mut bytes = file(&[("exits", 1, 0), ("wait", 2, 8)], 16, &[7, 1, 2]);
            let index = index % bytes.len();
            bytes[index] = value;
            if let Ok(schema) = parse(&bytes) {
                schema.values(&bytes);
            }
        }
    }
}

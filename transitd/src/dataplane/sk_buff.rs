//! Where the running kernel has the fields of `struct sk_buff`, by its BTF.
//!
//! Format: the kernel's documentation, "BPF Type Format (BTF)".

use std::path::{Path, PathBuf};

use thiserror::Error;
use thuban_common::skb::{SPAN, SkbLayout};

/// The constant of the programs that says the layout.
pub const SKB_LAYOUT: &str = "SKB_LAYOUT";
/// The kernel's own types.
const KERNEL: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
/// Bytes of a type before what its kind adds, and of a member.
const TYPE: usize = 12;
const MEMBER: usize = 12;
const STRUCT: u32 = 4;
const UNION: u32 = 5;

#[derive(Debug, Error)]
pub enum LayoutError {
    #[error("cannot read {path}; the kernel must be built with CONFIG_DEBUG_INFO_BTF")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{KERNEL} is not BTF that can be read")]
    Malformed,
    #[error("{KERNEL} has no field {0} of struct sk_buff as it should be; this kernel is not supported")]
    Field(&'static str),
}

/// Reads the layout of the running kernel.
pub fn of_kernel() -> Result<SkbLayout, LayoutError> {
    let path = Path::new(KERNEL);
    let data = std::fs::read(path).map_err(|source| LayoutError::Read {
        path: path.to_owned(),
        source,
    })?;
    let types = Types::read(&data).ok_or(LayoutError::Malformed)?;
    let sk_buff = types.find("sk_buff").ok_or(LayoutError::Field("sk_buff"))?;
    // Bit offsets.
    let bit = |name| types.member(sk_buff, name).ok_or(LayoutError::Field(name));
    let byte = |name| match bit(name)? {
        bit if bit % 8 == 0 => Ok(bit / 8),
        _ => Err(LayoutError::Field(name)),
    };
    let (ip_summed, csum_start) = (bit("ip_summed")?, byte("csum_start")?);
    if byte("csum_offset")? != csum_start + 2 {
        return Err(LayoutError::Field("csum_offset"));
    }
    let mac_header = byte("mac_header")?;
    let bytes = [ip_summed / 8, csum_start, mac_header];
    let part = bytes.into_iter().min().unwrap_or_default();
    let [byte_of_summed, csum_start, mac_header] = bytes.map(|byte| byte - part);
    if csum_start.max(mac_header) as usize + 4 > SPAN {
        return Err(LayoutError::Field("mac_header"));
    }
    Ok(SkbLayout {
        part,
        ip_summed: byte_of_summed,
        ip_summed_bit: ip_summed % 8,
        csum_start,
        mac_header,
    })
}

/// The types of a BTF file. Numbers of types begin with 1.
struct Types<'a> {
    data: &'a [u8],
    /// Where each type begins.
    places: Vec<usize>,
    /// Where names begin.
    strings: usize,
}

impl<'a> Types<'a> {
    fn read(data: &'a [u8]) -> Option<Self> {
        let magic = data.get(..2)?;
        if magic != MAGIC.to_ne_bytes() {
            return None;
        }
        let mut types = Self {
            data,
            places: Vec::new(),
            strings: 0,
        };
        let header = types.word(4)? as usize;
        let mut at = header + types.word(8)? as usize;
        let end = at + types.word(12)? as usize;
        types.strings = header + types.word(16)? as usize;
        while at < end {
            types.places.push(at);
            let count = types.word(at + 4)? as usize & 0xffff;
            at += TYPE + extra(types.kind(at)?, count)?;
        }
        Some(types)
    }

    fn word(&self, at: usize) -> Option<u32> {
        let bytes = self.data.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn kind(&self, at: usize) -> Option<u32> {
        Some(self.word(at + 4)? >> 24 & 0x1f)
    }

    /// Whether the name at an offset, of a type or a member, is this one.
    fn is_named(&self, at: usize, name: &str) -> bool {
        let begin = self.word(at).map(|offset| self.strings + offset as usize);
        let text = begin.and_then(|begin| self.data.get(begin..begin + name.len() + 1));
        text.is_some_and(|text| text.strip_suffix(&[0]) == Some(name.as_bytes()))
    }

    /// Returns the place of a structure.
    fn find(&self, name: &str) -> Option<usize> {
        let mut places = self.places.iter().copied();
        places.find(|at| self.kind(*at) == Some(STRUCT) && self.is_named(*at, name))
    }

    /// Returns the bit at which a member of a structure or union begins; also one of an unnamed part of it.
    fn member(&self, at: usize, name: &str) -> Option<u32> {
        let info = self.word(at + 4)?;
        let has_sizes = info >> 31 == 1;
        for index in 0..info as usize & 0xffff {
            let member = at + TYPE + index * MEMBER;
            let offset = self.word(member + 8)?;
            let offset = if has_sizes { offset & 0xff_ffff } else { offset };
            if self.is_named(member, name) {
                return Some(offset);
            }
            if !self.is_named(member, "") {
                continue;
            }
            let number = self.word(member + 4)? as usize;
            let Some(part) = number.checked_sub(1).and_then(|index| self.places.get(index)) else {
                continue;
            };
            if matches!(self.kind(*part)?, STRUCT | UNION)
                && let Some(inner) = self.member(*part, name)
            {
                return Some(offset + inner);
            }
        }
        None
    }
}

/// Returns how many bytes a type of the kind has behind its head; none: the kind is not known.
fn extra(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // Pointers, forward declarations, names, qualifiers, functions, floats.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, enumerations of 64 bits.
        STRUCT | UNION | 15 | 19 => 12 * count,
        // Enumerations, prototypes.
        6 | 13 => 8 * count,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::of_kernel;

    #[test]
    fn the_kernel_says_where_its_fields_are() {
        let layout = of_kernel().unwrap();
        // All of them are in the part that a clone copies, in this order.
        assert!(layout.ip_summed < layout.csum_start && layout.csum_start + 4 <= layout.mac_header);
        assert!(layout.part > 0 && layout.ip_summed_bit <= 6, "{layout:?}");
    }
}

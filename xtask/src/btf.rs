//! The eBPF object's BTF: what the kernel needs to tell global functions from others.
//!
//! The linker translates the compiler's debug information. One thing of Rust's has no translation that kernels take:
//! an enum whose fields don't begin at its first byte becomes a union whose members don't. The kernel refuses the
//! whole BTF for it, and then each function counts as static. Nothing reads these unions, so their members are moved.
//! Format: the kernel's documentation, "BPF Type Format (BTF)".

use anyhow::{Context, Result, bail, ensure};
use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};

const MAGIC: u32 = 0xeb9f;
/// Bytes of a type before what its kind adds.
const TYPE: usize = 12;
const KIND_UNION: u32 = 5;

/// Returns the object with BTF that kernels take, and without the debug information that BTF was made from.
pub fn finish(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object).context("reading the eBPF object")?;
    let mut has_btf = false;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        if name.starts_with(b".debug_") || name.starts_with(b".rel.debug_") {
            section.delete = true;
        } else if name == b".BTF"
            && let SectionData::Data(data) = &mut section.data
        {
            let mut btf = data.to_vec();
            move_members(&mut btf).context("BTF")?;
            section.data = SectionData::Data(btf.into());
            has_btf = true;
        }
    }
    ensure!(has_btf, "the eBPF object has no BTF: is it linked with --btf?");
    // The linker has one table for names of all kinds, the builder wants two.
    let names = builder.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut finished = Vec::new();
    builder.write(&mut finished).context("writing the eBPF object")?;
    Ok(finished)
}

/// Has each member of each union begin at the union's first byte.
fn move_members(btf: &mut [u8]) -> Result<()> {
    ensure!(word(btf, 0)? & 0xffff == MAGIC, "unknown format");
    let start = size(btf, 4)? + size(btf, 8)?;
    let end = start + size(btf, 12)?;
    let mut at = start;
    while at < end {
        let info = word(btf, at + 4)?;
        let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        at += TYPE;
        if kind == KIND_UNION {
            for member in 0..members {
                let offset = at + member * 12 + 8;
                btf.get_mut(offset..offset + 4).context("cut short")?.fill(0);
            }
        }
        at += match kind {
            // INT, VAR, DECL_TAG
            1 | 14 | 17 => 4,
            // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG
            2 | 7..=12 | 16 | 18 => 0,
            // ARRAY
            3 => 12,
            // STRUCT, UNION, DATASEC, ENUM64
            4 | 5 | 15 | 19 => 12 * members,
            // ENUM, FUNC_PROTO
            6 | 13 => 8 * members,
            kind => bail!("unknown kind {kind}"),
        };
    }
    Ok(())
}

fn word(data: &[u8], at: usize) -> Result<u32> {
    let bytes = data.get(at..at + 4).context("cut short")?;
    Ok(u32::from_le_bytes(bytes.try_into()?))
}

fn size(data: &[u8], at: usize) -> Result<usize> {
    Ok(word(data, at)? as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_unions_begin_where_the_union_does() -> Result<()> {
        let words = [
            MAGIC | 1 << 16,
            24, // the header's length
            0,  // where types begin behind it, and their length
            40,
            40, // and of strings
            0,
            // INT, and what it adds
            0,
            1 << 24,
            4,
            32,
            // UNION of one member: its name, its type, its offset in bits
            0,
            KIND_UNION << 24 | 1,
            8,
            0,
            1,
            32,
        ];
        let mut btf: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
        let mut expected = btf.clone();
        expected[60..64].fill(0);
        move_members(&mut btf)?;
        assert_eq!(btf, expected);
        Ok(())
    }

    #[test]
    fn what_is_no_btf_is_refused() {
        assert!(move_members(&mut [0; 24]).is_err());
        assert!(move_members(&mut []).is_err());
    }
}

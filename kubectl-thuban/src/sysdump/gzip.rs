//! A writer of gzip (RFC 1952). Each block is a member of its own, so that memory is bounded; readers join members.

use std::io::{self, Write};

use miniz_oxide::deflate::compress_to_vec;

/// No name, no time, made on an unknown system.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
const LEVEL: u8 = 6;
const BLOCK: usize = 1 << 20;

/// Compresses what is written to it. What is left is written by [`Gzip::finish`] alone.
#[derive(Debug)]
pub struct Gzip<W> {
    to: W,
    block: Vec<u8>,
}

impl<W: Write> Gzip<W> {
    pub fn new(to: W) -> Self {
        Self {
            to,
            block: Vec::new(),
        }
    }

    /// Writes the rest, and returns the writer below.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_block()?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn end_block(&mut self) -> io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        let length = self.block.len() as u32;
        self.to.write_all(&HEADER)?;
        self.to.write_all(&compress_to_vec(&self.block, LEVEL))?;
        self.to.write_all(&crc32fast::hash(&self.block).to_le_bytes())?;
        self.to.write_all(&length.to_le_bytes())?;
        self.block.clear();
        Ok(())
    }
}

impl<W: Write> Write for Gzip<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = BLOCK - self.block.len();
        let taken = &bytes[..bytes.len().min(room)];
        self.block.extend_from_slice(taken);
        if self.block.len() == BLOCK {
            self.end_block()?;
        }
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{BLOCK, Gzip};
    use crate::testing::gunzip;

    #[test]
    fn what_is_written_is_read_by_gzip() {
        for length in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7] {
            let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            let mut gzip = Gzip::new(Vec::new());
            gzip.write_all(&bytes).unwrap();
            let packed = gzip.finish().unwrap();
            if length > 0 {
                assert!(gunzip(&packed) == bytes, "{length}");
                assert!(packed.len() < length + 64, "{length}");
            }
        }
    }
}

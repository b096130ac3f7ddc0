//! Programs of a few instructions: some are the baseline for our own programs, others send frames to them.

/// XDP verdicts of linux/bpf.h.
pub const XDP_DROP: u32 = 1;
pub const XDP_PASS: u32 = 2;
pub const XDP_TX: u32 = 3;
pub const XDP_REDIRECT: u32 = 4;
/// tc verdicts of linux/pkt_cls.h.
pub const TC_OK: u32 = 0;
pub const TC_SHOT: u32 = 2;
pub const TC_REDIRECT: u32 = 7;

/// Returns a `struct bpf_insn`, little-endian: code, registers, offset, immediate.
const fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: u32) -> u64 {
    code as u64
        | (destination as u64) << 8
        | (source as u64) << 12
        | (offset.cast_unsigned() as u64) << 16
        | (immediate as u64) << 32
}

const MOVE: u8 = 0xb7;
const MOVE_REGISTER: u8 = 0xbf;
const ADD: u8 = 0x07;
const LOAD_WORD: u8 = 0x61;
const LOAD_CONSTANT: u8 = 0x18;
const STORE_DOUBLE: u8 = 0x7b;
const JUMP_IF_ABOVE: u8 = 0x2d;
const EXIT: u8 = 0x95;
const MODULO: u8 = 0x97;
const MULTIPLY: u8 = 0x27;
const TO_BIG_ENDIAN: u8 = 0xdc;
const STORE_WORD: u8 = 0x63;
const CALL: u8 = 0x85;
/// The helper bpf_get_prandom_u32.
const RANDOM: u32 = 7;

/// An address that each frame gets at random: `first + n * step`, with n below `count`, written at `offset`.
#[derive(Clone, Copy, Debug)]
pub struct Scatter {
    pub offset: u16,
    pub first: u32,
    pub step: u32,
    pub count: u32,
}

/// Returns a program that returns a verdict and does nothing else.
pub fn answer(verdict: u32) -> Vec<u64> {
    vec![instruction(MOVE, 0, 0, 0, verdict), instruction(EXIT, 0, 0, 0, 0)]
}

/// Returns an XDP program. It writes the beginning of a frame anew, in words of 8 bytes, and an address if asked for.
/// Then it sends the frame out where it came in. Frames of a live run come back as the last program left them.
pub fn restore_and_send(beginning: &[[u8; 8]], scatter: Option<Scatter>) -> Vec<u64> {
    let mut length = beginning.len() as u32 * 8;
    // Instructions up to the exit: three for each word (a constant counts as two), one for the address, one for the
    // verdict.
    let mut jump = beginning.len() as u16 * 3 + 1;
    let mut program = vec![instruction(MOVE_REGISTER, 7, 1, 0, 0)];
    if let Some(scatter) = scatter {
        length = length.max(u32::from(scatter.offset) + 4);
        jump += 1;
        program.extend([
            instruction(CALL, 0, 0, 0, RANDOM),
            instruction(MODULO, 0, 0, 0, scatter.count),
            instruction(MULTIPLY, 0, 0, 0, scatter.step),
            instruction(ADD, 0, 0, 0, scatter.first),
            instruction(TO_BIG_ENDIAN, 0, 0, 0, 32),
            instruction(MOVE_REGISTER, 6, 0, 0, 0),
        ]);
    }
    program.extend([
        instruction(MOVE, 0, 0, 0, XDP_DROP),
        instruction(LOAD_WORD, 2, 7, 0, 0),
        instruction(LOAD_WORD, 3, 7, 4, 0),
        instruction(MOVE_REGISTER, 4, 2, 0, 0),
        instruction(ADD, 4, 0, 0, length),
        instruction(JUMP_IF_ABOVE, 4, 3, jump.cast_signed(), 0),
    ]);
    for (offset, bytes) in (0..).step_by(8).zip(beginning) {
        let word = u64::from_le_bytes(*bytes);
        program.push(instruction(LOAD_CONSTANT, 5, 0, 0, word as u32));
        program.push(instruction(0, 0, 0, 0, (word >> 32) as u32));
        program.push(instruction(STORE_DOUBLE, 2, 5, offset, 0));
    }
    if let Some(scatter) = scatter {
        program.push(instruction(STORE_WORD, 2, 6, scatter.offset.cast_signed(), 0));
    }
    program.extend(answer(XDP_TX));
    program
}

#[cfg(test)]
mod tests {
    use super::{answer, restore_and_send};

    #[test]
    fn instructions_are_encoded_as_the_kernel_reads_them() {
        assert_eq!(answer(2), [0x0000_0002_0000_00b7, 0x95]);
        let program = restore_and_send(&[[1, 2, 3, 4, 5, 6, 7, 8]], None);
        assert_eq!(program.len(), 7 + 3 + 2);
        assert_eq!(program[6], 0x0004_342d);
        assert_eq!(program[7..9], [0x0403_0201_0000_0518, 0x0807_0605_0000_0000]);
    }
}

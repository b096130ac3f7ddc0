//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624). Words are raw: the sum is the same in any
//! byte order.

/// Folds the carries of a sum of words into 16 bits.
#[inline(always)]
pub const fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}

/// Returns the unfolded sum of some words.
#[inline(always)]
pub const fn sum<const N: usize>(words: [u16; N]) -> u32 {
    let mut sum = 0;
    let mut index = 0;
    // There is no iterator here: the verifier needs a loop that the compiler unrolls.
    while index < N {
        sum += words[index] as u32;
        index += 1;
    }
    sum
}

/// Returns the checksum field after one word changed from `old` to `new` (RFC 1624 equation 3).
#[inline(always)]
pub const fn replace(checksum: u16, old: u16, new: u16) -> u16 {
    !fold((!checksum) as u32 + (!old) as u32 + new as u32)
}

#[cfg(test)]
mod tests {
    use super::{fold, replace};
    use crate::testing::Random;

    fn full(words: &[u16]) -> u16 {
        !fold(words.iter().map(|word| u32::from(*word)).sum())
    }

    #[test]
    fn incremental_update_equals_full_sum() {
        let mut random = Random::from_clock();
        for _ in 0..20_000 {
            let mut words = [0_u16; 10];
            for word in &mut words {
                *word = random.u32() as u16;
            }
            words[0] |= 0x45; // a header is never all zeros, the one case where +0 and -0 differ
            words[5] = 0;
            let before = full(&words);
            let (index, new) = ([1, 2, 3, 4, 6, 7, 8, 9][random.below(8)], random.u32() as u16);
            let updated = replace(before, words[index], new);
            words[index] = new;
            assert_eq!(updated, full(&words), "seed {}", random.seed());
        }
    }
}

//! Congestion marks through the tunnel (RFC 6040, normal mode): copied out at encapsulation, combined at decapsulation.

/// Both bits: congestion experienced.
const CE: u8 = 3;
/// ECT(1).
const ECT1: u8 = 1;
/// ECT(0).
const ECT0: u8 = 2;
/// The bits of ECN in a traffic class.
const MASK: u8 = 3;

/// Returns the inner traffic class after decapsulation (RFC 6040 figure 4); `None`: the packet must be dropped,
/// because its sender would not understand the mark.
#[inline(always)]
pub const fn decapsulate(outer: u8, inner: u8) -> Option<u8> {
    match (outer & MASK, inner & MASK) {
        (CE, 0) => None,
        (CE, _) => Some(inner | CE),
        (ECT1, ECT0) => Some(inner & !MASK | ECT1),
        _ => Some(inner),
    }
}

#[cfg(test)]
mod tests {
    use super::decapsulate;

    /// RFC 6040 figure 4, rows: inner Not-ECT, ECT(0), ECT(1), CE; columns: outer the same.
    #[test]
    fn marks_combine_as_the_rfc_says() {
        let (not, zero, one, ce) = (0, 2, 1, 3);
        let figure = [
            (not, [Some(not), Some(not), Some(not), None]),
            (zero, [Some(zero), Some(zero), Some(one), Some(ce)]),
            (one, [Some(one), Some(one), Some(one), Some(ce)]),
            (ce, [Some(ce), Some(ce), Some(ce), Some(ce)]),
        ];
        for (inner, expected) in figure {
            for (outer, expected) in [not, zero, one, ce].into_iter().zip(expected) {
                assert_eq!(
                    decapsulate(0xb8 | outer, 0x28 | inner),
                    expected.map(|bits| 0x28 | bits),
                    "outer {outer} inner {inner}"
                );
            }
        }
    }
}

//! DSCP: the class of service in the header of an IP packet.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// A DSCP, 0 to 63 (RFC 2474).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dscp(u8);

impl Dscp {
    /// The class of packets that ask for none: best effort.
    pub const DEFAULT: Self = Self(0);

    /// Returns the DSCP of a number, if it is one.
    pub const fn new(number: u8) -> Option<Self> {
        if number > 63 { None } else { Some(Self(number)) }
    }

    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns what `Vpc.spec.dscp` says. `None`: outer headers have the DSCP of the inner one.
    pub fn of_field(field: Option<&IntOrString>) -> Option<Self> {
        match field? {
            IntOrString::Int(number) => Self::new(u8::try_from(*number).ok()?),
            IntOrString::String(text) => (text == "Clear").then_some(Self::DEFAULT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_says_copy_clear_or_a_number() {
        let of = |field| Dscp::of_field(Some(&field)).map(Dscp::get);
        let text = |text: &str| IntOrString::String(text.into());
        assert_eq!(Dscp::of_field(None), None);
        assert_eq!([of(text("Copy")), of(text("Clear"))], [None, Some(0)]);
        let numbers = [0, 46, 63, 64, -1, 256].map(|number| of(IntOrString::Int(number)));
        assert_eq!(numbers, [Some(0), Some(46), Some(63), None, None, None]);
    }
}

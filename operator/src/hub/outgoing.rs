//! Messages to droplets. Rows stay bytes: those that many droplets have are encoded once and held once.
//!
//! Invariant: the bytes of a message are those of the `OperatorMessage` that it unpacks to.

use prost::bytes::{BufMut, Bytes};
use prost::{EncodeError, Message as _, encode_length_delimiter, length_delimiter_len};
use thuban_proto::transit::{OperatorMessage, Program, operator_message};

use crate::model::rows::{Key, PackedRow};
use crate::model::world::{Delta, OtherDroplets, Snapshot};

/// The key of `OperatorMessage.program`: field 1, whose length comes before its bytes.
const PROGRAM_KEY: u8 = (1 << 3) | 2;

/// A message to a droplet. Each stream's queues have room for some dozens, so they are small.
#[derive(Clone, Debug)]
pub enum Outgoing {
    Program(Box<PackedProgram>),
    Other(Box<OperatorMessage>),
}

/// A program with its rows as bytes.
#[derive(Clone, Debug)]
pub struct PackedProgram {
    pub epoch: u64,
    pub sequence: u64,
    pub is_snapshot: bool,
    /// Rows of known droplets that all snapshots share.
    droplets: OtherDroplets,
    rows: Vec<PackedRow>,
    deletes: Vec<Key>,
}

impl PackedProgram {
    /// Makes a program of all rows that a droplet has from now on.
    pub fn snapshot(epoch: u64, sequence: u64, snapshot: Snapshot) -> Self {
        Self {
            epoch,
            sequence,
            is_snapshot: true,
            droplets: snapshot.droplets,
            rows: snapshot.rows.into_values().collect(),
            deletes: Vec::new(),
        }
    }

    /// Makes a program of changes.
    pub fn changes(epoch: u64, sequence: u64, delta: Delta) -> Self {
        let (mut rows, mut deletes) = (Vec::new(), Vec::new());
        for (key, row) in delta {
            match row {
                Some(row) => rows.push(row),
                None => deletes.push(key),
            }
        }
        Self {
            epoch,
            sequence,
            is_snapshot: false,
            droplets: OtherDroplets::default(),
            rows,
            deletes,
        }
    }

    /// Returns how many rows it sets.
    pub fn upserts(&self) -> usize {
        self.droplets.count() + self.rows.len()
    }

    /// Returns how many rows it deletes.
    pub fn deletes(&self) -> usize {
        self.deletes.len()
    }

    /// Returns the program without its rows.
    fn head(&self) -> Program {
        Program {
            epoch: self.epoch,
            sequence: self.sequence,
            snapshot: self.is_snapshot,
            upserts: Vec::new(),
            deletes: self.deletes.iter().map(Into::into).collect(),
        }
    }

    /// Yields the bytes of the rows. Each part is a program with rows and nothing else.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.droplets
            .parts()
            .map(AsRef::as_ref)
            .chain(self.rows.iter().map(PackedRow::bytes))
    }

    /// Returns the length of the program in a message, without the key and the length before it.
    fn len(&self, head: &Program) -> usize {
        head.encoded_len() + self.parts().map(<[u8]>::len).sum::<usize>()
    }

    fn encode_own(&self, buffer: &mut impl BufMut) -> Result<(), EncodeError> {
        buffer.put_u8(PROGRAM_KEY);
        let head = self.head();
        encode_length_delimiter(self.len(&head), buffer)?;
        head.encode(buffer)?;
        // Programs one after the other are a program with the rows of all of them, in any order.
        for row in &self.rows {
            buffer.put_slice(row.bytes());
        }
        Ok(())
    }
}

impl Outgoing {
    pub fn encoded_len(&self) -> usize {
        match self {
            Self::Program(program) => {
                let length = program.len(&program.head());
                1 + length_delimiter_len(length) + length
            }
            Self::Other(message) => message.encoded_len(),
        }
    }

    /// Yields the bytes that other streams have, too.
    pub fn shared(&self) -> impl Iterator<Item = &Bytes> {
        let droplets = match self {
            Self::Program(program) => Some(program.droplets.parts()),
            Self::Other(_) => None,
        };
        droplets.into_iter().flatten().filter(|part| !part.is_empty())
    }

    /// Writes the first bytes of the message. After them come those that other streams have, too.
    pub fn encode_own(&self, buffer: &mut impl BufMut) -> Result<(), EncodeError> {
        match self {
            Self::Program(program) => program.encode_own(buffer),
            Self::Other(message) => message.encode(buffer),
        }
    }

    /// Returns the message as its droplet reads it.
    pub fn unpack(self) -> OperatorMessage {
        let packed = match self {
            Self::Program(packed) => packed,
            Self::Other(message) => return *message,
        };
        let mut program = packed.head();
        for part in packed.parts() {
            // `PackedRow::new` wrote these bytes, so they can be read.
            program
                .upserts
                .extend(Program::decode(part).unwrap_or_default().upserts);
        }
        OperatorMessage {
            message: Some(operator_message::Message::Program(program)),
        }
    }
}

impl From<PackedProgram> for Outgoing {
    fn from(program: PackedProgram) -> Self {
        Self::Program(program.into())
    }
}

impl From<OperatorMessage> for Outgoing {
    fn from(message: OperatorMessage) -> Self {
        Self::Other(message.into())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use thuban_rows::builders::{VNI, row};
    use thuban_rows::{Kind, Row};

    use super::*;
    use crate::model::world::{World, tests::vpc};

    fn read(message: &Outgoing) -> Program {
        let mut bytes = Vec::new();
        message.encode_own(&mut bytes).unwrap();
        bytes.extend(message.shared().flatten());
        assert_eq!(bytes.len(), message.encoded_len());
        let read = OperatorMessage::decode(bytes.as_slice()).unwrap();
        assert_eq!(read, message.clone().unpack());
        match read.message {
            Some(operator_message::Message::Program(program)) => program,
            other => panic!("not a program: {other:?}"),
        }
    }

    #[test]
    fn droplets_read_what_messages_of_rows_would_say() {
        let kinds = [Kind::Vpc, Kind::Local, Kind::Service, Kind::PolicySet];
        let rows: Vec<Row> = kinds.into_iter().map(row).collect();
        let new = rows.iter().map(|row| (row.key(), Some(PackedRow::new(row))));
        let gone = Key::Network(VNI, thuban_rows::builders::network_id(3));
        let delta: Delta = new.chain([(gone.clone(), None)]).collect();
        let program = PackedProgram::changes(7, 9, delta.clone());
        assert_eq!((program.upserts(), program.deletes()), (4, 1));
        let program = read(&program.into());
        assert_eq!((program.epoch, program.sequence, program.snapshot), (7, 9, false));
        let rows = delta.values().flatten().map(PackedRow::unpack);
        assert_eq!(program.upserts, rows.collect::<Vec<_>>());
        assert_eq!(program.deletes, [(&gone).into()]);
        let nothing = PackedProgram::changes(u64::MAX, u64::MAX, Delta::new());
        assert_eq!(read(&nothing.into()).upserts, []);
    }

    #[test]
    fn a_snapshot_has_the_rows_of_all_other_droplets() {
        let mut world = World::default();
        world.set_vpc("red", Some(vpc(7)));
        for last in 0..200 {
            world.set_droplet(&format!("d{last}"), Some(Ipv4Addr::new(172, 16, 0, last)));
        }
        world.flush();
        for droplet in ["d0", "d100", "d199", "stranger"] {
            let snapshot = PackedProgram::snapshot(1, 1, world.snapshot(droplet));
            let rows = world.program(droplet);
            assert_eq!(snapshot.upserts(), rows.len(), "{droplet}");
            let sort = |mut rows: Vec<Row>| {
                rows.sort_by_key(Row::key);
                rows
            };
            let read = read(&snapshot.into());
            assert!(read.snapshot);
            let read = read.upserts.into_iter().map(|row| Row::try_from(row).unwrap());
            let wanted = rows.values().map(|row| Row::try_from(row.unpack()).unwrap());
            assert_eq!(sort(read.collect()), sort(wanted.collect()), "{droplet}");
        }
        world.set_droplet("d100", None);
        world.flush();
        let left = |world: &mut World, droplet| world.snapshot(droplet).droplets.count();
        assert_eq!((left(&mut world, "d0"), left(&mut world, "d100")), (198, 0));
    }
}

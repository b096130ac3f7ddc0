//! Framing of messages: prost's way, with buffers that suit streams which are quiet most of the time.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Bytes of a stream's buffer in each direction. The buffer grows with a message that is larger; an operator has a
/// stream for each droplet.
const BUFFER: usize = 1024;
/// Messages are sent together up to this number of bytes, which is the default.
const TOGETHER: usize = 32 * 1024;

/// A codec that sends `T` and receives `U`.
#[derive(Clone, Copy, Debug)]
pub struct SmallBuffers<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallBuffers<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallBuffers<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER, TOGETHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER, TOGETHER))
    }
}

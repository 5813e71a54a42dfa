import torch, triton, sys
sys.path.insert(0, '.')
from tests.triton_support import kernels, test_interpreter as t
print(torch.__version__, triton.__version__, torch.cuda.get_device_name())
torch.manual_seed(0)
a,b=torch.randn(32,64),torch.randn(64,16)
def cut(x): return (x.view(torch.int32)&~0x1FFF).view(torch.float32)
def rna(x): return ((x.view(torch.int32)+0x1000)&~0x1FFF).view(torch.float32)
for p in ('ieee','tf32x3','tf32'):
    c=torch.empty(32,16,device='cuda'); kernels.dot[(1,)](a.cuda(),b.cuda(),c,32,64,16,p); c=c.cpu().double()
    print(p, *[f'{n}={(c-f(a).double()@f(b).double()).abs().max():.2e}' for n,f in (('exact',lambda x:x),('cut',cut),('rna',rna))])
a,b=torch.randn(64,64),torch.randn(64,64)
c=torch.empty(64,64,device='cuda'); kernels.matmul[(1,)](a.cuda(),b.cuda(),c,64,64,64,64); c=c.cpu().double()
print('wgmma tf32', *[f'{n}={(c-f(a).double()@f(b).double()).abs().max():.2e}' for n,f in (('exact',lambda x:x),('cut',cut),('rna',rna))])
for op,f in t.ARITHMETIC.items():
    x,y=torch.randn(256,dtype=t.BF16),torch.randn(256,dtype=t.BF16).abs()+.01
    z=torch.empty_like(x,device='cuda'); kernels.arithmetic[(1,)](x.cuda(),y.cuda(),z,256,op)
    print(op, (z.cpu()!=f(x,y)).sum().item(), 'differ')
for dt in (t.BF16,t.FP16,t.FP32):
    for op,f in t.REDUCTIONS.items():
        x=torch.randn(4,64,dtype=dt)-3; e=f(x); z=torch.empty(4,dtype=e.dtype,device='cuda')
        kernels.reduce[(1,)](x.cuda(),z,4,64,op); print(dt,op,(z.cpu().double()-e.double()).abs().max().item(), end='; ')
print()
x=torch.randn(4,64,dtype=t.BF16)-3; z=torch.empty(4,dtype=t.BF16,device='cuda'); kernels.reduce[(1,)](x.cuda(),z,4,64,'sum'); print('bf16 sum', z.cpu().tolist(), x.double().sum(1).tolist())
for s in (t.BF16,t.FP16,t.FP32,t.FP64,torch.int32):
    for d in (t.BF16,t.FP16,t.FP32,t.FP64,torch.int32):
        x=(torch.randn(256,dtype=t.FP64)*100).to(s); y=torch.empty(256,dtype=d,device='cuda'); kernels.convert[(1,)](x.cuda(),y,256)
        n=(y.cpu()!=x.to(d)).sum().item()
        if n: print('convert',s,d,n)
x=torch.tensor([1+2**-8+2**-40]*16,dtype=t.FP64); y=torch.empty(16,dtype=t.BF16,device='cuda'); kernels.convert[(1,)](x.cuda(),y,16); print('fp64->bf16', y[0].item())
y=torch.empty(16,device='cuda'); kernels.masked_copy[(1,)](torch.ones(16,device='cuda'),y,10,None,16); print('no other', y[10:].tolist())
